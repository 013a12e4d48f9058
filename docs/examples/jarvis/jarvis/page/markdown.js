// A small Markdown, made of DOM nodes: what the model writes is never taken for HTML.

const INLINE = /(`+)([\s\S]+?)\1|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?])/g;

export function markdown(text) {
  const whole = document.createDocumentFragment();
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) {
      at += 1;
    } else if ((found = /^\s{0,3}(`{3,}|~{3,})\s*(\S*)/.exec(line))) {
      at = fence(whole, lines, at, found[1]);
    } else if ((found = /^(#{1,6})\s+(.*)$/.exec(line))) {
      whole.append(inline(element(`h${Math.min(found[1].length + 1, 4)}`), found[2]));
      at += 1;
    } else if (/^\s{0,3}>/.test(line)) {
      const quoted = taken(lines, at, /^\s{0,3}>\s?/);
      const quote = element("blockquote");
      quote.append(markdown(quoted.map((each) => each.replace(/^\s{0,3}>\s?/, "")).join("\n")));
      whole.append(quote);
      at += quoted.length;
    } else if (/^\s*([-*+]|\d+[.)])\s+/.test(line)) {
      at = list(whole, lines, at);
    } else {
      at = paragraph(whole, lines, at);
    }
  }
  return whole;
}

function element(name) {
  return document.createElement(name);
}

function taken(lines, from, pattern) {
  let to = from;
  while (to < lines.length && pattern.test(lines[to])) to += 1;
  return lines.slice(from, to);
}

function fence(into, lines, at, mark) {
  const code = element("code");
  let to = at + 1;
  while (to < lines.length && !lines[to].trim().startsWith(mark)) to += 1;
  code.textContent = lines.slice(at + 1, to).join("\n");
  const block = element("pre");
  block.tabIndex = 0; // so that a wide one can be scrolled with the keyboard
  block.append(code);
  into.append(block);
  return to + 1;
}

function list(into, lines, at) {
  const isOrdered = /^\s*\d/.test(lines[at]);
  const items = element(isOrdered ? "ol" : "ul");
  const indent = lines[at].search(/\S/);
  while (at < lines.length && lines[at].trim()) {
    const found = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/.exec(lines[at]);
    if (found && found[1].length > indent && items.lastChild) {
      at = list(items.lastChild, lines, at);
    } else if (found && found[1].length >= indent) {
      if (/^\d/.test(found[2]) !== isOrdered) break;
      if (isOrdered && !items.firstChild) items.start = Number.parseInt(found[2], 10);
      items.append(inline(element("li"), found[3]));
      at += 1;
    } else if (!found && items.lastChild) {
      inline(items.lastChild, ` ${lines[at].trim()}`);
      at += 1;
    } else {
      break;
    }
  }
  into.append(items);
  return at;
}

function paragraph(into, lines, at) {
  const block = element("p");
  for (let first = true; at < lines.length && lines[at].trim(); at += 1, first = false) {
    if (!first && /^\s{0,3}(`{3,}|~{3,}|#{1,6}\s|>|[-*+]\s|\d+[.)]\s)/.test(lines[at])) break;
    if (!first) block.append(element("br"));
    inline(block, lines[at]);
  }
  into.append(block);
  return at;
}

function inline(into, text) {
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    into.append(text.slice(from, found.index));
    from = found.index + found[0].length;
    const [, , code, strong, emphasis, label, address, bare] = found;
    if (code !== undefined) into.append(filled("code", code));
    else if (strong !== undefined) into.append(inline(element("strong"), strong));
    else if (emphasis !== undefined) into.append(inline(element("em"), emphasis));
    else into.append(link(label ?? bare, address ?? bare));
  }
  into.append(text.slice(from));
  return into;
}

function filled(name, text) {
  const made = element(name);
  made.textContent = text;
  return made;
}

function link(label, address) {
  const made = filled("a", label);
  made.href = address;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}
