// The page: one conversation at a time, its stream, and what the keys and buttons do.

import { newId, Refused, request, Stream } from "./api.js";
import { Conversation } from "./state.js";
import { countDown, make, View } from "./view.js";

const $ = (id) => document.getElementById(id);
const box = $("message");
const scroll = $("scroll");
const view = new View($("turns"), { answer, stop, again });

let conversation = null;
let stream = null;
let drawing = null;
let follows = true; // whether the newest words are to stay in view

// --- conversations ---

function open(id) {
  stream?.close();
  conversation = new Conversation(id);
  follows = true;
  view.clear();
  $("turns").ariaBusy = "true";
  const opened = conversation;
  const path = `/conversations/${id}`;
  stream = new Stream(`${path}/events`, {
    // The stream is open before the stored messages are read: what ends between the two is in one of them.
    opened: () => load(opened),
    event: (event) => {
      if (event.type === "messages_changed") load(opened);
      else happened(opened, event);
    },
    connected: (isConnected) => tellConnection(opened, isConnected),
  });
  box.value = draft().text;
  fit();
  draw();
}

async function load(opened) {
  // One at a time, and once more if something has changed meanwhile.
  if (opened.isLoading) {
    opened.loadsAgain = true;
    return;
  }
  opened.isLoading = true;
  try {
    do {
      opened.loadsAgain = false;
      const found = await request("GET", `/conversations/${opened.id}`);
      opened.stored(found);
      opened.isLoaded = true;
      draw();
    } while (opened.loadsAgain);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    setTimeout(() => load(opened), 2000);
  } finally {
    opened.isLoading = false;
  }
  if (opened === conversation) {
    $("turns").ariaBusy = "false";
    list();
  }
}

async function list() {
  let found;
  try {
    found = await request("GET", "/conversations");
  } catch {
    return;
  }
  const items = found.map(({ id, title }) => {
    const link = make("a", { href: `/c/${id}`, textContent: title, title });
    if (id === conversation?.id) link.setAttribute("aria-current", "page");
    link.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
      event.preventDefault();
      go(id);
    });
    return make("li", {}, [link]);
  });
  const list = $("conversations");
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  list.replaceChildren(...items);
  if (focused) list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
}

function go(id) {
  history.pushState(null, "", `/c/${id}`);
  showSide(false);
  open(id);
  list();
  box.focus();
}

function here() {
  const found = /^\/c\/([\w-]{1,64})$/.exec(location.pathname);
  if (found) return found[1];
  const id = newId();
  history.replaceState(null, "", `/c/${id}`);
  return id;
}

// --- what happens ---

let told = "";
function tell(text) {
  if (text === told) return;
  told = text;
  $("said").textContent = text;
}

function happened(opened, event) {
  opened.happened(event);
  if (event.type === "turn_started") tell("The answer begins.");
  if (event.type === "turn_ended") tell(event.outcome.type === "error" ? "The answer failed." : `Answer: ${event.outcome.text}`);
  if (event.type === "question") tell(`${event.kind === "approval" ? "May this be run?" : "A question for you:"} ${event.text}`);
  if (event.type === "events_missed") load(opened);
  draw();
}

function tellConnection(opened, isConnected) {
  if (opened !== conversation) return;
  $("connection").hidden = isConnected;
  $("connection").textContent = isConnected ? "" : "The connection is lost. Trying again…";
}

// With the next frame; soon also where there are no frames, as in a tab that nobody sees.
function draw() {
  if (drawing !== null) return;
  const once = () => {
    cancelAnimationFrame(drawing.frame);
    clearTimeout(drawing.timer);
    drawing = null;
    drawNow();
  };
  drawing = { frame: requestAnimationFrame(once), timer: setTimeout(once, 100) };
}

function drawNow() {
  view.draw(conversation);
  const isEmpty = conversation.isLoaded && conversation.turns.size === 0;
  $("empty").hidden = !isEmpty;
  $("turns").hidden = isEmpty;
  $("title").textContent = conversation.title || "New conversation";
  document.title = conversation.title ? `${conversation.title} · Jarvis` : "Jarvis";
  if (document.activeElement !== $("runtime")) $("runtime").value = conversation.runtime;
  const isRunning = conversation.running !== null;
  $("stop").hidden = $("steer").hidden = $("more-keys").hidden = !isRunning;
  box.placeholder = isRunning ? "Next message, or steer" : "Write a message";
  drawButtons();
  countDown($("turns"));
  keepInView();
}

function drawButtons() {
  const isEmpty = !box.value.trim();
  $("send").disabled = isEmpty;
  $("steer").disabled = isEmpty;
}

setInterval(() => countDown($("turns")), 1000);

// --- the message box ---

// A message has its id before it is sent, and keeps it until Jarvis has taken it: sent twice, it is still one message.
function draft() {
  try {
    return { text: "", ...JSON.parse(sessionStorage.getItem(`draft ${conversation.id}`)) };
  } catch {
    return { text: "" };
  }
}

function keepDraft() {
  if (box.value) sessionStorage.setItem(`draft ${conversation.id}`, JSON.stringify({ text: box.value }));
  else sessionStorage.removeItem(`draft ${conversation.id}`);
}

function clearBox() {
  box.value = "";
  keepDraft();
  fit();
  drawButtons();
}

function fit() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function send() {
  const text = box.value.trim();
  if (!text) return;
  clearBox();
  const turn = conversation.turn(newId());
  Object.assign(turn, { text, state: "sending" });
  follows = true;
  post(conversation, turn);
}

async function post(opened, turn) {
  opened.set(turn, "sending");
  draw();
  for (let tries = 1; ; tries += 1) {
    try {
      await request("POST", `/conversations/${opened.id}/messages`, { id: turn.id, text: turn.text });
      if (turn.state === "sending") opened.set(turn, "waiting");
      break;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (turn.state !== "sending") break; // only the answer was lost: the stream has shown that it arrived
      if (error.status === 0 && tries < 3) continue; // it may have arrived: with the same id nothing is done twice
      opened.set(turn, "unsent");
      turn.note = error.message;
      break;
    }
  }
  draw();
}

function again(turn) {
  turn.note = null;
  return post(conversation, turn);
}

async function answer(turn, part, text) {
  try {
    await request("POST", `/conversations/${conversation.id}/questions/${encodeURIComponent(part.id)}`, { text });
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 410) throw error;
    part.answer = "too late";
    conversation.changed.add(turn.id);
    draw();
  }
  box.focus({ preventScroll: true });
}

async function stop(turn) {
  if (turn.state === "waiting") conversation.set(turn, "withdrawing");
  try {
    await request("DELETE", `/conversations/${conversation.id}/turns/${encodeURIComponent(turn.id)}`);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    tell(error.message);
  }
  load(conversation);
}

function stopRunning() {
  if (conversation.running !== null) stop(conversation.turns.get(conversation.running));
}

async function steer() {
  const text = box.value.trim();
  if (!text || conversation.running === null) return;
  clearBox();
  try {
    await request("POST", `/conversations/${conversation.id}/steer`, { text });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    box.value = text; // it was not heard
    keepDraft();
    fit();
    tell(error.message);
  }
  draw();
}

// --- what is in view ---

function keepInView() {
  if (follows) scroll.scrollTop = scroll.scrollHeight;
  showLatest();
}

function showLatest() {
  $("latest").hidden = follows || scroll.scrollHeight - scroll.clientHeight < 80;
}

scroll.addEventListener("scroll", () => {
  follows = scroll.scrollHeight - scroll.clientHeight - scroll.scrollTop < 40;
  showLatest();
});
new ResizeObserver(keepInView).observe(scroll);
$("turns").addEventListener("toggle", showLatest, true);

function showSide(isShown) {
  $("side").classList.toggle("open", isShown);
  $("shade").hidden = !isShown;
  $("open-side").setAttribute("aria-expanded", String(isShown));
}

// --- keys and buttons ---

box.addEventListener("input", () => {
  keepDraft();
  fit();
  drawButtons();
});
box.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) steer();
  else send();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("steer").addEventListener("click", steer);
$("stop").addEventListener("click", () => {
  stopRunning();
  box.focus();
});
$("latest").addEventListener("click", () => {
  follows = true;
  keepInView();
});
$("new").addEventListener("click", () => go(newId()));
$("open-side").addEventListener("click", () => {
  showSide(true);
  $("close-side").focus();
});
for (const each of [$("close-side"), $("shade")]) {
  each.addEventListener("click", () => {
    showSide(false);
    $("open-side").focus();
  });
}
$("runtime").addEventListener("change", async () => {
  try {
    await request("PUT", `/conversations/${conversation.id}/runtime`, { runtime: $("runtime").value });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    $("runtime").value = conversation.runtime;
    tell(error.message);
  }
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if ($("side").classList.contains("open")) {
    showSide(false);
    $("open-side").focus();
  } else {
    stopRunning();
  }
});
addEventListener("popstate", () => open(here()));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && conversation) load(conversation);
});

open(here());
list();
box.focus();
