// The requests to Jarvis, and the stream of a conversation's events.

export class Refused extends Error {
  constructor(status, message, error) {
    super(message);
    this.status = status; // 0: not answered at all
    this.error = error;
  }
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (each) => each.toString(16).padStart(2, "0")).join("");
}

export async function request(method, path, body) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Refused(0, "Jarvis cannot be reached.");
  }
  const text = await answer.text();
  let found = null;
  try {
    found = text ? JSON.parse(text) : null;
  } catch {
    // a proxy has answered
  }
  if (answer.ok) return found;
  const detail = typeof found?.detail === "string" ? found.detail : `Jarvis answered with status ${answer.status}.`;
  throw new Refused(answer.status, detail, found?.error);
}

const TYPES = [
  "turn_started", "text_delta", "reasoning_delta", "tool_started", "tool_finished", "status", "question",
  "question_answered", "turn_steered", "turn_ended", "events_missed", "messages_changed",
];

// The browser connects again by itself, and says with Last-Event-ID what it has seen. Only if the server has refused
// it does this make a new connection, which begins anew: `opened` is called, and the events of the turn come again.
export class Stream {
  constructor(path, { opened, event, connected }) {
    this.path = path;
    this.handlers = { opened, event, connected };
    this.isClosed = false;
    this.open();
  }

  open() {
    const source = new EventSource(this.path);
    this.source = source;
    source.onopen = () => {
      this.handlers.connected(true);
      this.handlers.opened();
    };
    source.onerror = () => {
      if (this.isClosed) return;
      this.handlers.connected(false);
      if (source.readyState === EventSource.CLOSED) this.again = setTimeout(() => this.open(), 2000);
    };
    for (const type of TYPES) {
      source.addEventListener(type, (message) => {
        if (!this.isClosed) this.handlers.event(JSON.parse(message.data));
      });
    }
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.again);
    this.source.close();
  }
}
