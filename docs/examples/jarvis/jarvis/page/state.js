// What is known of a conversation: its turns by their ids, put together from the stored messages and from the events.
// No DOM in here.

export class Conversation {
  constructor(id) {
    this.id = id;
    this.title = "";
    this.runtime = "hermes";
    this.turns = new Map(); // in the order in which they are shown
    this.running = null; // the id of the turn that a worker has
    this.changed = new Set(); // the ids of the turns to draw again
  }

  turn(id) {
    let turn = this.turns.get(id);
    if (turn === undefined) {
      // state: sending, unsent, waiting, running, done, stopped, failed, or lost (asked, and no answer is on its way)
      turn = { id, text: "", state: "waiting", attempt: 0, parts: [], note: null, error: null, runtime: null };
      this.turns.set(id, turn);
    }
    this.changed.add(id);
    return turn;
  }

  get isBusy() {
    return this.running !== null || [...this.turns.values()].some((turn) => turn.state === "waiting");
  }

  // --- what is stored ---

  stored(found) {
    this.title = found.title;
    this.runtime = found.runtime;
    for (const message of found.messages) {
      const turn = this.turn(message.turn_id);
      if (message.role === "user") {
        turn.text = message.text;
        if (turn.state === "sending" || turn.state === "unsent") turn.state = "waiting";
        continue;
      }
      if (turn.state === "running") continue; // its stream is on the way to the same end
      turn.runtime = message.runtime;
      turn.note = message.note;
      turn.state = message.state;
      if (message.state === "failed") turn.error ??= { message: message.note };
      if (turn.wasSeen) continue; // seen live, with more than is stored
      turn.parts = message.tools.map((tool, at) => ({
        kind: "tool", id: `stored-${at}`, name: tool.name, arguments: tool.arguments ?? "",
        how: tool.ok === true ? "ok" : tool.ok === false ? "failed" : "unknown",
      }));
      if (message.text) turn.parts.push({ kind: "text", text: message.text });
    }
    const answered = new Set(found.messages.filter((each) => each.role === "assistant").map((each) => each.turn_id));
    const known = new Set(found.messages.map((each) => each.turn_id));
    for (const turn of this.turns.values()) {
      if ((turn.state === "waiting" || turn.state === "lost") && !answered.has(turn.id)) {
        this.set(turn, found.turns.includes(turn.id) ? "waiting" : "lost");
      }
      if (turn.state === "withdrawing" && !known.has(turn.id)) this.remove(turn.id);
    }
    for (const part of this.turns.get(this.running)?.parts ?? []) {
      const left = part.kind === "question" ? found.questions[part.id] : undefined;
      if (left === undefined) continue;
      part.until = Date.now() + 1000 * left; // not as long as when it was asked, if the page came later
      this.changed.add(this.running);
    }
    this.sort(found.messages);
  }

  // The stored order, then what is not stored yet.
  sort(messages) {
    const order = [...new Set(messages.map((message) => message.turn_id))];
    const rest = [...this.turns.keys()].filter((id) => !order.includes(id));
    this.turns = new Map([...order, ...rest].map((id) => [id, this.turns.get(id)]));
  }

  remove(id) {
    this.turns.delete(id);
    this.changed.add(id);
  }

  set(turn, state) {
    if (turn.state === state) return;
    turn.state = state;
    this.changed.add(turn.id);
  }

  // --- what happens ---

  happened(event) {
    if (event.type === "events_missed") {
      this.missed(event.snapshot);
      return;
    }
    const turn = this.turn(event.turn_id);
    switch (event.type) {
      case "turn_started":
        this.running = turn.id;
        Object.assign(turn, { text: event.text, state: "running", attempt: 0, parts: [], note: null, error: null, wasSeen: false });
        return;
      case "turn_ended":
        this.ended(turn, event.outcome);
        return;
      case "question_answered":
        for (const part of turn.parts) {
          if (part.kind === "question" && part.id === event.question_id) part.answer = event.text ?? "nobody was there";
        }
        return;
      case "turn_steered":
        turn.parts.push({ kind: "steered", text: event.text });
        return;
    }
    if (event.attempt !== turn.attempt) {
      // A worker died: another one begins the answer again.
      if (turn.attempt) turn.parts = [{ kind: "status", text: "Begun again, since the first try was cut short." }];
      turn.attempt = event.attempt;
    }
    this.progressed(turn, event);
  }

  progressed(turn, event) {
    switch (event.type) {
      case "text_delta":
        join(turn.parts, "text", event.text);
        break;
      case "reasoning_delta":
        join(turn.parts, "reasoning", event.text);
        break;
      case "tool_started":
        turn.parts.push({ kind: "tool", id: event.call_id, name: event.name, arguments: event.arguments, how: "running" });
        break;
      case "tool_finished": {
        const tool = turn.parts.findLast((part) => part.kind === "tool" && part.id === event.call_id);
        if (tool) Object.assign(tool, { how: event.ok ? "ok" : "failed", result: event.result, seconds: event.duration_s });
        break;
      }
      case "status":
        turn.parts.push({ kind: "status", text: event.text });
        break;
      case "question":
        turn.parts.push({
          kind: "question", id: event.question_id, about: event.kind, text: event.text, choices: event.choices,
          until: Date.now() + 1000 * event.timeout_s, answer: null,
        });
        break;
    }
  }

  ended(turn, outcome) {
    if (this.running === turn.id) this.running = null;
    finish(turn, outcome.type === "error" ? "" : outcome.text);
    turn.wasSeen = true;
    if (outcome.type === "error") {
      turn.wasSeen = outcome.sent;
      // Jarvis may answer in Hermes' place, where the message was not seen: the stored messages tell.
      Object.assign(turn, outcome.sent ? { state: "failed", error: outcome } : { state: "waiting" });
      return;
    }
    turn.state = outcome.outcome === "interrupted" ? "stopped" : "done";
    turn.runtime = "hermes";
    turn.note = outcome.notice;
    if (outcome.pending_steer) turn.note = [turn.note, `Too late to be heard: ${outcome.pending_steer}`].filter(Boolean).join(" ");
  }

  missed(snapshot) {
    for (const turn of this.turns.values()) {
      if (turn.state === "running" && turn.id !== snapshot?.turn_id) this.set(turn, "lost");
    }
    this.running = snapshot?.turn_id ?? null;
    if (!snapshot) return;
    const turn = this.turn(snapshot.turn_id);
    const parts = [];
    if (snapshot.reasoning) parts.push({ kind: "reasoning", text: snapshot.reasoning });
    for (const tool of snapshot.tools) {
      const how = !tool.finished ? "running" : tool.ok ? "ok" : "failed";
      parts.push({ kind: "tool", id: tool.call_id, name: tool.name, arguments: tool.arguments, how });
    }
    if (snapshot.said) parts.push({ kind: "text", text: snapshot.said });
    Object.assign(turn, { text: snapshot.text, state: "running", attempt: snapshot.attempt, parts });
    for (const question of snapshot.questions) this.progressed(turn, question);
  }
}

// Nothing is open any more, and what was said ends with `text`, whatever of it was seen.
function finish(turn, text) {
  for (const part of turn.parts) {
    if (part.kind === "tool" && part.how === "running") part.how = "unknown";
    if (part.kind === "question" && part.answer === null) part.answer = "not answered";
  }
  const said = turn.parts.filter((part) => part.kind === "text").map((part) => part.text).join("");
  if (!text || said.endsWith(text)) return;
  const last = turn.parts.findLastIndex((part) => part.kind === "text");
  const tool = turn.parts.findLastIndex((part) => part.kind === "tool");
  if (last > tool) turn.parts[last].text = text;
  else turn.parts.push({ kind: "text", text });
}

function join(parts, kind, text) {
  const last = parts.at(-1);
  if (last?.kind === kind) last.text += text;
  else parts.push({ kind, text });
}
