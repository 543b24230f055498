// Markdown as DOM nodes. Text becomes text nodes alone: no markup of a message is ever parsed as HTML.

const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

function element(name, children = [], properties = {}) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

// Every pattern looks at so many characters at most, so that no text takes more than a time in proportion to its length.
const INLINE = [
  [/^(`{1,8})(?!`)([^`]|[^`][\s\S]{0,2000}?[^`])\1(?!`)/, (found) => element("code", [found[2].trim()])],
  [/^`+/, (found) => found[0]],
  [/^\\([\\`*_{}[\]()#+\-.!|~>])/, (found) => found[1]],
  [/^!?\[([^\]\n]{0,500})\]\( {0,9}<?((?:[^\s<>()]|\([^\s<>()]{0,200}\)){0,2000})>?(?: {1,9}"[^"\n]{0,500}")? {0,9}\)/, (found, depth) => link(found[2], inline(found[1] || found[2], depth))],
  [/^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/i, (found) => link(found[1], [found[1]])],
  [/^(\*\*|__)(?=[^\s*_])([\s\S]{0,1000}?\S)\1/, (found, depth) => element("strong", inline(found[2], depth))],
  [/^~~(?=[^\s~])([\s\S]{0,1000}?\S)~~/, (found, depth) => element("del", inline(found[1], depth))],
  [/^\*(?=\S)([^*]{0,1000}?[^\s*])\*(?!\*)/, (found, depth) => element("em", inline(found[1], depth))],
  [/^_(?=\S)([^_]{0,1000}?[^\s_])_(?![\w_])/, (found, depth) => element("em", inline(found[1], depth))],
  [/^[*_~]{3,}/, (found) => found[0]],
  [/^https?:\/\/[^\s<>()"'`]{0,2000}[^\s<>()"'`.,;:!?]/i, (found) => link(found[0], [found[0]])],
  [/^(?: {2,}|\\)\n/, () => element("br")],
];

function link(target, children) {
  if (!SAFE_LINK.test(target)) {
    return element("span", children);
  }
  return element("a", children, { href: target, rel: "noopener noreferrer nofollow", target: "_blank" });
}

function inline(text, depth = 0) {
  if (depth > 6) return [document.createTextNode(text)];
  const nodes = [];
  let plain = "";
  let rest = text;
  let before = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  while (rest) {
    const next = rest.slice(1).search(/[`\\![<*_~h \n]/);
    const rule = INLINE.find(([pattern]) => {
      const inWord = /^[_h]/.test(rest) && /\w/.test(before);
      return !inWord && pattern.test(rest);
    });
    if (rule) {
      const found = rule[0].exec(rest);
      const node = rule[1](found, depth + 1);
      if (typeof node === "string") plain += node;
      else {
        flush();
        nodes.push(node);
      }
      before = found[0].at(-1);
      rest = rest.slice(found[0].length);
    } else {
      const size = next < 0 ? rest.length : next + 1;
      plain += rest.slice(0, size);
      before = rest[size - 1];
      rest = rest.slice(size);
    }
  }
  flush();
  return nodes;
}

const FENCE = /^ {0,3}(`{3,}(?!.*`)|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

function codeBlock(lines, language) {
  const code = element("code", [lines.join("\n")]);
  const copy = element("button", ["Copy"], { type: "button", className: "quiet copy" });
  copy.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(code.textContent);
    copy.textContent = "Copied";
  });
  return element("div", [element("span", [language], { className: "faint" }), copy, element("pre", [code], { tabIndex: 0 })], { className: "code" });
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[1]).map((cell) => (/^:-*:$/.test(cell) ? "center" : cell.endsWith(":") && "right"));
  const place = (index) => (sides[index] ? { className: sides[index] } : {});
  const row = (line, kind) => element("tr", cells(line).map((cell, index) => element(kind, inline(cell), place(index))));
  return element("div", [
    element("table", [element("thead", [row(lines[0], "th")]), element("tbody", lines.slice(2).map((line) => row(line, "td")))]),
  ], { className: "scroll", tabIndex: 0 });
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) items.push([found[3]]);
    else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), indent + 2)));
  }
  for (const item of items) while (item.length > 1 && !item.at(-1).trim()) item.pop();
  const made = element(isOrdered ? "ol" : "ul", items.map((item) => element("li", item.length > 1 ? blocks(item, depth + 1) : inline(item[0]))), { dir: "auto" });
  if (isOrdered) made.start = Math.min(parseInt(first[2], 10), 1e6);
  return made;
}

function blocks(lines, depth = 0) {
  const nodes = [];
  let index = 0;
  const takeWhile = (test) => {
    const begin = index;
    while (index < lines.length && test(lines[index], index)) index += 1;
    return lines.slice(begin, index);
  };
  while (index < lines.length) {
    const line = lines[index];
    const fence = FENCE.exec(line);
    const heading = /^ {0,3}(#{1,6}) +(.*)$/.exec(line);
    const below = (lines[index + 1] ?? "").trim();
    if (!line.trim()) index += 1;
    else if (fence) {
      index += 1;
      const content = takeWhile((other) => !(other.trim().startsWith(fence[1]) && !other.trim().slice(fence[1].length).trim()));
      index += 1;
      const indent = line.search(/\S/);
      nodes.push(codeBlock(content.map((other) => other.slice(Math.min(other.search(/\S|$/), indent))), fence[2]));
    } else if (heading) {
      index += 1;
      nodes.push(element(`h${Math.min(6, heading[1].length + 2)}`, inline(heading[2].trim().replace(/ #{1,9}$/, ""))));
    } else if (/^ {0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      index += 1;
      nodes.push(element("hr"));
    } else if (/^ {0,3}>/.test(line) && depth < 8) {
      nodes.push(element("blockquote", blocks(takeWhile((other) => /^ {0,3}>/.test(other)).map((other) => other.replace(/^ {0,3}> ?/, "")), depth + 1)));
    } else if (ITEM.test(line) && depth < 8) {
      const isOrdered = (item) => /^\s*\d/.test(item);
      // after an empty line, too: code of an item, or the next item
      const goesOn = (other) => /^\s{2,}\S/.test(other) || (ITEM.test(other) && isOrdered(other) === isOrdered(line));
      let next = index;
      const content = takeWhile((other, at) => {
        if (other.trim()) return ITEM.test(other) || /^\s{2,}\S/.test(other);
        for (next = Math.max(next, at); next < lines.length && !lines[next].trim();) next += 1;
        return next < lines.length && goesOn(lines[next]);
      });
      nodes.push(list(content, depth));
    } else if (line.includes("|") && below.length < 1000 && /^\|?( *:?-+:? *\|)* *:?-+:? *\|?$/.test(below)) {
      nodes.push(table(takeWhile((other) => other.includes("|") || /^[\s:|-]+$/.test(other) && other.trim())));
    } else {
      const begin = index;
      const content = takeWhile((other) => other.trim() && !FENCE.test(other) && (index === begin || !(/^ {0,3}(#{1,6}\s|>)/.test(other) || ITEM.test(other))));
      nodes.push(element("p", inline(content.join("\n"))));
    }
  }
  return nodes;
}

// The nodes of a whole message.
export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"));
}
