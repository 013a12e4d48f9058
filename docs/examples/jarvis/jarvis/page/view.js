// Draws turns. A turn is drawn again as a whole, but parts that have not changed keep their elements, so that an open
// tool card stays open and what is typed into an answer stays there.

import { markdown } from "./markdown.js";

const APPROVALS = {
  once: "Allow once", session: "Allow in this conversation", always: "Always allow", deny: "Deny",
};
const MARKS = { ok: "M4.5 10.5l3.6 3.6 7.4-8", failed: "M5.5 5.5l9 9M14.5 5.5l-9 9", unknown: "M5 10h10" };

export class View {
  // `acts` has what the buttons do: answer(turn, part, text), stop(turn), again(turn).
  constructor(into, acts) {
    this.into = into;
    this.acts = acts;
    this.drawn = new Map();
  }

  clear() {
    this.into.replaceChildren();
    this.drawn.clear();
  }

  draw(conversation) {
    for (const id of conversation.changed) {
      const turn = conversation.turns.get(id);
      if (turn) this.drawTurn(turn);
      else this.drop(id);
    }
    conversation.changed.clear();
    // Only what stands in the wrong place is moved: a focused button must not lose its focus.
    let before = null;
    for (const id of conversation.turns.keys()) {
      const { article } = this.drawn.get(id) ?? this.drawTurn(conversation.turns.get(id));
      const wanted = before === null ? this.into.firstChild : before.nextSibling;
      if (wanted !== article) this.into.insertBefore(article, wanted);
      before = article;
    }
  }

  drop(id) {
    this.drawn.get(id)?.article.remove();
    this.drawn.delete(id);
  }

  drawTurn(turn) {
    let drawn = this.drawn.get(turn.id);
    if (!drawn) {
      const article = make("article", { className: "turn" });
      drawn = { article, you: make("div", { className: "you" }), body: make("div", { className: "answer" }), end: make("div"), parts: [] };
      article.dataset.turn = turn.id;
      article.append(drawn.you, drawn.body, drawn.end);
      this.drawn.set(turn.id, drawn);
    }
    drawn.article.dataset.state = turn.state;
    this.drawYou(drawn.you, turn);
    this.drawParts(drawn, turn);
    this.drawEnd(drawn.end, turn);
    return drawn;
  }

  drawYou(into, turn) {
    const about = {
      sending: ["Sending"],
      unsent: ["Not sent.", this.button("Try again", () => this.acts.again(turn))],
      waiting: ["Waiting", this.button("Withdraw", () => this.acts.stop(turn))],
      lost: ["No answer is on its way.", this.button("Ask again", () => this.acts.again(turn))],
    }[turn.state];
    const key = `${turn.state}\n${turn.text}`;
    if (into.dataset.key === key) return;
    into.dataset.key = key;
    into.replaceChildren(
      make("h2", { className: "unseen", textContent: "You" }),
      make("div", { className: "words", textContent: turn.text, dir: "auto" }),
      ...(about ? [make("p", { className: "about" }, about)] : []),
    );
  }

  drawParts(drawn, turn) {
    const parts = turn.parts;
    drawn.parts.length = Math.min(drawn.parts.length, parts.length);
    parts.forEach((part, at) => {
      const isLast = at === parts.length - 1;
      const { until, ...shown } = part;
      const key = JSON.stringify([shown, part.kind === "text" && isLast]);
      const known = drawn.parts[at];
      if (until !== undefined) known?.element.querySelector(".left")?.setAttribute("data-until", until);
      if (known?.key === key) return;
      if (known?.kind === part.kind && (part.id === undefined || known.id === part.id)) {
        this[part.kind](known.element, part, turn, isLast);
        known.key = key;
        return;
      }
      const element = make(part.kind === "reasoning" || part.kind === "tool" ? "details" : "div", { className: `part ${part.kind}` });
      this[part.kind](element, part, turn, isLast);
      drawn.parts[at] = { key, kind: part.kind, id: part.id, element };
    });
    const wanted = [make("h2", { className: "unseen", textContent: turn.runtime === "jarvis" ? "Jarvis" : "Answer" })];
    wanted.push(...drawn.parts.map((each) => each.element));
    const isSilent = turn.state === "running" && !["text", "question"].includes(parts.at(-1)?.kind) && !parts.some((part) => part.how === "running");
    if (isSilent) wanted.push(make("div", { className: "waiting", title: "Working" }, [make("i"), make("i"), make("i")]));
    settle(drawn.body, wanted);
  }

  text(element, part, turn, isLast) {
    element.classList.toggle("last", isLast);
    element.dir = "auto";
    element.replaceChildren(markdown(part.text));
  }

  reasoning(element, part) {
    if (!element.firstChild) {
      element.append(make("summary", {}, [icon("M7.5 5l5 5-5 5", "fold"), "Reasoning"]), make("div", { className: "thoughts", dir: "auto" }));
    }
    element.lastChild.textContent = part.text;
  }

  tool(element, part) {
    element.dataset.how = part.how;
    const how = { running: "running", ok: took(part.seconds), failed: "failed", unknown: "" }[part.how];
    const mark = make("span", { className: "mark" }, MARKS[part.how] ? [icon(MARKS[part.how])] : []);
    const summary = make("summary", {}, [
      mark,
      make("span", { className: "name", textContent: part.name }),
      make("span", { className: "preview", textContent: oneLine(part.arguments) }),
      make("span", { className: "how", textContent: how }),
    ]);
    const details = make("dl", {}, [make("dt", { textContent: "Arguments" }), make("dd", {}, [make("pre", { textContent: pretty(part.arguments) })])]);
    if (part.result !== undefined) {
      details.append(make("dt", { textContent: "Result" }), make("dd", {}, [make("pre", { textContent: pretty(part.result) })]));
    }
    const hadFocus = element.contains(document.activeElement);
    element.replaceChildren(summary, details);
    if (hadFocus) summary.focus();
  }

  status(element, part) {
    element.textContent = part.text;
  }

  steered(element, part) {
    element.replaceChildren(make("b", { textContent: "You, meanwhile" }), part.text);
  }

  question(element, part, turn) {
    const isApproval = part.about === "approval";
    const isOpen = part.answer === null;
    element.classList.toggle("closed", !isOpen);
    element.setAttribute("role", "group");
    const heading = make("h3", {}, [make("span", { textContent: isApproval ? "May this be run?" : "A question for you" })]);
    element.setAttribute("aria-label", heading.textContent);
    const [first, ...more] = part.text.split("\n\n");
    const what = isApproval
      ? [make("pre", { textContent: first }), ...(more.length ? [make("p", { textContent: more.join("\n\n") })] : [])]
      : [make("p", { textContent: part.text, dir: "auto" })];
    if (!isOpen) {
      const answer = isApproval ? (APPROVALS[part.answer] ?? part.answer) : part.answer;
      element.replaceChildren(heading, ...what, make("p", { className: "answered" }, ["Answer: ", make("strong", { textContent: answer })]));
      return;
    }
    const left = make("span", { className: "left" });
    left.dataset.until = part.until;
    heading.append(left);
    const say = (text) => {
      for (const each of element.querySelectorAll("button, input")) each.disabled = true;
      this.acts.answer(turn, part, text).catch(() => {
        for (const each of element.querySelectorAll("button, input")) each.disabled = false;
      });
    };
    const choices = part.choices.map((choice) => {
      const label = isApproval ? (APPROVALS[choice] ?? choice) : choice;
      const kind = !isApproval ? "" : choice === "once" ? "main" : choice === "deny" ? "no" : "";
      return this.button(label, () => say(choice), kind);
    });
    const rows = [make("div", { className: "choices" }, choices)];
    if (!isApproval) {
      const input = make("input", { type: "text", ariaLabel: "Your answer", placeholder: choices.length ? "Or in your own words" : "Your answer" });
      const form = make("form", {}, [input, make("button", { type: "submit", className: "main", textContent: "Answer" })]);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        if (input.value.trim()) say(input.value.trim());
      });
      rows.push(form);
    }
    element.replaceChildren(heading, ...what, ...rows);
  }

  drawEnd(into, turn) {
    const shown = [];
    if (turn.state === "failed") {
      const error = turn.error ?? {};
      const lines = [make("p", { textContent: error.message ?? "The answer failed." })];
      const acted = (error.tools ?? []).filter((tool) => tool.may_have_acted).map((tool) => tool.name);
      if (acted.length) lines.push(make("p", { textContent: `It may have acted already: ${acted.join(", ")}. Look before you ask again.` }));
      shown.push(make("div", { className: "failed", role: "alert" }, lines));
    }
    const notes = [];
    if (turn.state === "stopped") notes.push("Stopped");
    if (turn.runtime === "jarvis") notes.push(make("span", { className: "badge", textContent: "Jarvis" }));
    if (turn.note && turn.state !== "failed") notes.push(turn.note);
    if (notes.length) shown.push(make("p", { className: "end" }, notes.map((each) => make("span", {}, [each]))));
    into.replaceChildren(...shown);
  }

  button(label, act, kind = "link") {
    const made = make("button", { type: "button", className: kind, textContent: label });
    made.addEventListener("click", act);
    return made;
  }
}

// Shows how long each open question still waits.
export function countDown(into) {
  for (const each of into.querySelectorAll(".left")) {
    const seconds = Math.max(0, Math.ceil((Number(each.dataset.until) - Date.now()) / 1000));
    const shown = seconds >= 90 ? `${Math.round(seconds / 60)} min left` : `${seconds} s left`;
    if (each.textContent !== shown) each.textContent = shown;
  }
}

export function make(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  if (properties.role) made.setAttribute("role", properties.role);
  made.append(...children);
  return made;
}

function settle(into, wanted) {
  wanted.forEach((each, at) => {
    if (into.childNodes[at] !== each) into.insertBefore(each, into.childNodes[at] ?? null);
  });
  while (into.childNodes.length > wanted.length) into.lastChild.remove();
}

function icon(path, className = "") {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  picture.setAttribute("viewBox", "0 0 20 20");
  picture.setAttribute("aria-hidden", "true");
  if (className) picture.setAttribute("class", className);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  picture.append(line);
  return picture;
}

function took(seconds) {
  if (typeof seconds !== "number") return "done";
  return seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
}

function pretty(text) {
  try {
    const found = JSON.parse(text);
    return typeof found === "object" ? JSON.stringify(found, null, 2) : String(found);
  } catch {
    return text;
  }
}

// Of arguments with a single value, as most have, the value says enough.
function oneLine(text) {
  try {
    const values = Object.values(JSON.parse(text));
    if (values.length === 1 && typeof values[0] === "string") return values[0].replaceAll(/\s+/g, " ");
  } catch {
    // shortened, or no JSON
  }
  return text.replaceAll(/\s+/g, " ");
}
