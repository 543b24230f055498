// Conversations: trees of messages, of which one path is shown. They are kept in the browser's own storage.

import { markdown } from "./markdown.js";
import { HttpError, events, request, save } from "./stream.js";

const STORE = "fleetfoot.conversations";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const ROLES = ["user", "assistant", "tool"];
const MOST = 200;

const $ = (id) => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria") || key === "role") node.setAttribute(key.replace(/([A-Z])/g, "-$1").toLowerCase(), value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

const button = (text, label, onclick) => make("button", { type: "button", className: "quiet", ariaLabel: label, title: label, onclick }, text);

function newConversation() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "New chat", nodes: [], leaf: -1 };
}

// What another page or a file says, as a conversation of the known form; null if it is none.
function checked(given) {
  if (typeof given !== "object" || given === null || !Array.isArray(given.nodes)) return null;
  const made = newConversation();
  made.title = String(given.title ?? "Imported").slice(0, 200);
  for (const [index, node] of given.nodes.entries()) {
    const parent = Number(node?.parent);
    if (!ROLES.includes(node?.role) || !Number.isInteger(parent) || parent < -1 || parent >= index) return null;
    const copy = { role: node.role, parent, content: String(node.content ?? ""), chosen: -1 };
    if (node.reasoning) copy.reasoning = String(node.reasoning);
    if (node.note) copy.note = String(node.note);
    if (node.toolCallId) copy.toolCallId = String(node.toolCallId);
    if (Array.isArray(node.toolCalls)) copy.toolCalls = node.toolCalls.map((call) => ({ id: String(call?.id ?? ""), name: String(call?.name ?? ""), arguments: String(call?.arguments ?? "") }));
    if (Array.isArray(node.tokens)) {
      copy.tokens = node.tokens.map((one) => ({ text: String(one?.text ?? ""), logprob: Number(one?.logprob) || 0, top: Array.isArray(one?.top) ? one.top.map((other) => [String(other?.[0] ?? ""), Number(other?.[1]) || 0]) : [] }));
    }
    made.nodes.push(copy);
  }
  const leaf = Number(given.leaf);
  made.leaf = Number.isInteger(leaf) && leaf >= -1 && leaf < made.nodes.length ? leaf : made.nodes.length - 1;
  return made;
}

export class Chat {
  constructor(getKey, onUnauthorized) {
    this.getKey = getKey;
    this.onUnauthorized = onUnauthorized;
    this.running = null;
    this.conversations = this.load();
    this.current = this.conversations[0];
    this.articles = new Map();
    $("compose").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("stop").addEventListener("click", () => this.stop());
    $("new").addEventListener("click", () => this.begin());
    $("export").addEventListener("click", () => this.exportAll());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.importFile());
    addEventListener("storage", (event) => event.key === STORE && this.adopt());
    this.show();
  }

  // --- what is kept ---------------------------------------------------------------------------------------------

  load() {
    let found = [];
    try {
      const stored = JSON.parse(localStorage.getItem(STORE) ?? "[]");
      found = stored.flatMap((one) => {
        const known = checked(one);
        return known ? [Object.assign(known, typeof one.id === "string" ? { id: one.id } : {})] : [];
      });
    } catch {
      found = [];
    }
    return found.length ? found : [newConversation()];
  }

  // What another tab has kept, and the conversation that is shown here.
  adopt() {
    const found = this.load().filter((one) => one.nodes.length);
    const place = found.findIndex((one) => one.id === this.current.id);
    if (place < 0) found.unshift(this.current);
    else found[place] = this.current;
    this.conversations = found;
    this.showList();
  }

  save() {
    const kept = this.conversations.filter((one) => one.nodes.length).slice(0, MOST);
    for (let count = kept.length; count >= 0; count -= 1) {
      try {
        localStorage.setItem(STORE, JSON.stringify(kept.slice(0, count)));
        return;
      } catch {
        // the storage is full: without the oldest one
      }
    }
  }

  exportAll() {
    const content = JSON.stringify({ format: "fleetfoot.conversations", version: 1, conversations: this.conversations.filter((one) => one.nodes.length) }, null, 2);
    save(new Blob([content], { type: "application/json" }), "conversations.json");
  }

  async importFile() {
    const file = $("import-file").files[0];
    $("import-file").value = "";
    if (file) this.importText(await file.text());
  }

  importText(text) {
    let found = [];
    try {
      const content = JSON.parse(text);
      found = (content.conversations ?? [content]).map(checked).filter(Boolean);
    } catch {
      found = [];
    }
    if (!found.length) {
      this.say("The file has no conversations that this page knows.");
      return;
    }
    this.conversations.unshift(...found);
    this.choose(found[0]);
    this.save();
    this.say(`${found.length} conversation${found.length > 1 ? "s" : ""} imported.`);
  }

  // --- the tree -------------------------------------------------------------------------------------------------

  path() {
    const nodes = [];
    for (let at = this.current.leaf; at >= 0; at = this.current.nodes[at].parent) nodes.unshift(at);
    return nodes;
  }

  siblings(index) {
    const { nodes } = this.current;
    return nodes.flatMap((node, at) => (node.parent === nodes[index].parent ? [at] : []));
  }

  add(node) {
    this.current.nodes.push({ chosen: -1, ...node });
    this.current.leaf = this.current.nodes.length - 1;
    if (node.parent >= 0) this.current.nodes[node.parent].chosen = this.current.leaf;
    return this.current.leaf;
  }

  // Show the newest path through a message.
  descend(index) {
    const { nodes } = this.current;
    if (nodes[index].parent >= 0) nodes[nodes[index].parent].chosen = index;
    let at = index;
    for (;;) {
      const children = nodes.flatMap((node, child) => (node.parent === at ? [child] : []));
      if (!children.length) break;
      at = children.includes(nodes[at].chosen) ? nodes[at].chosen : children.at(-1);
    }
    this.current.leaf = at;
    this.show();
    this.save();
  }

  begin() {
    if (this.running) this.stop();
    if (this.conversations[0].nodes.length) this.conversations.unshift(newConversation());
    this.choose(this.conversations[0]);
    $("prompt").focus();
  }

  choose(conversation) {
    if (this.running) this.stop();
    this.current = conversation;
    this.show();
  }

  fork(index) {
    const copy = newConversation();
    copy.title = `${this.current.title} (copy)`;
    const path = this.path();
    for (const at of path.slice(0, path.indexOf(index) + 1)) {
      copy.nodes.push({ ...structuredClone(this.current.nodes[at]), parent: copy.nodes.length - 1, chosen: copy.nodes.length + 1 });
    }
    copy.leaf = copy.nodes.length - 1;
    this.conversations.unshift(copy);
    this.choose(copy);
    this.save();
  }

  // --- requests -------------------------------------------------------------------------------------------------

  settings() {
    const given = {};
    for (const name of NUMBERS) {
      if ($(name).value !== "") given[name] = Number($(name).value);
    }
    for (const [name, problem] of [["tools", "Tools"], ["schema", "The schema"]]) {
      const text = $(name).value.trim();
      if (!text) continue;
      let value;
      try {
        value = JSON.parse(text);
      } catch (error) {
        throw new Error(`${problem}: ${error.message}`);
      }
      if (name === "tools") given.tools = value;
      else given.response_format = { type: "json_schema", json_schema: { name: "answer", schema: value } };
    }
    if ($("logprobs").checked) Object.assign(given, { logprobs: true, top_logprobs: 5 });
    return given;
  }

  messages() {
    const system = $("system").value.trim();
    const list = system ? [{ role: "system", content: system }] : [];
    for (const at of this.path()) {
      const node = this.current.nodes[at];
      if (node.role === "assistant" && !node.content && !node.reasoning && !node.toolCalls?.length) {
        if (list.at(-1)?.role === "user") list.pop(); // a turn that failed is as if nobody had asked
        continue;
      }
      const message = { role: node.role, content: node.content };
      if (node.toolCalls?.length) message.tool_calls = node.toolCalls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      if (node.toolCallId) message.tool_call_id = node.toolCallId;
      list.push(message);
    }
    return list;
  }

  send() {
    const text = $("prompt").value.trim();
    if (!text || this.running) return;
    const fields = this.fields();
    if (!fields) return; // the text stays where it can be sent again
    $("prompt").value = "";
    if (!this.current.nodes.length) this.current.title = text.slice(0, 60);
    this.add({ role: "user", parent: this.current.leaf, content: text });
    this.answer(fields);
  }

  fields() {
    $("settings-problem").textContent = "";
    try {
      return this.settings();
    } catch (error) {
      $("settings-problem").textContent = error.message;
      this.say(error.message);
      return null;
    }
  }

  async answer(fields = this.fields()) {
    if (!fields) {
      this.show();
      return;
    }
    const messages = this.messages();
    const index = this.add({ role: "assistant", parent: this.current.leaf, content: "" });
    const node = this.current.nodes[index];
    const conversation = this.current;
    const running = new AbortController();
    this.running = running;
    this.show();
    $("stop").disabled = false;
    this.say("Answering…");
    const begin = performance.now();
    let first = 0;
    let usage = null;
    let frame = 0;
    let rest = 0;
    const redraw = () => {
      frame = 0;
      const now = performance.now();
      if (this.current === conversation) this.redraw(index);
      rest = performance.now() + 4 * (performance.now() - now); // long answers are drawn less often
    };
    try {
      const body = { model: $("models").value || undefined, messages, stream: true, stream_options: { include_usage: true }, ...fields };
      const response = await request("v1/chat/completions", { key: this.getKey(), body, signal: running.signal });
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        if (!choice) continue;
        this.take(node, choice);
        first ||= node.content || node.reasoning || node.toolCalls ? performance.now() : 0;
        if (performance.now() > rest) frame ||= requestAnimationFrame(redraw);
      }
      const seconds = (performance.now() - (first || begin)) / 1000;
      const count = usage?.completion_tokens ?? 0;
      const rate = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
      node.note = `${count} tokens, first after ${((first || begin) - begin).toFixed(0)} ms${rate}`;
      this.say("The answer is complete.");
    } catch (error) {
      node.note = error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`;
      this.say(node.note);
      if (error instanceof HttpError && error.status === 401) this.onUnauthorized();
    }
    cancelAnimationFrame(frame);
    if (this.running === running) {
      this.running = null;
      $("stop").disabled = true;
    }
    if (this.current === conversation) this.show();
    this.save();
  }

  take(node, choice) {
    const delta = choice.delta ?? {};
    node.content += delta.content ?? "";
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
    for (const call of delta.tool_calls ?? []) {
      node.toolCalls ??= [];
      const known = (node.toolCalls[call.index ?? 0] ??= { id: "", name: "", arguments: "" });
      known.id ||= call.id ?? "";
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    for (const one of choice.logprobs?.content ?? []) {
      node.tokens ??= [];
      node.tokens.push({ text: one.token, logprob: one.logprob, top: (one.top_logprobs ?? []).map((other) => [other.token, other.logprob]) });
    }
  }

  stop() {
    this.running?.abort();
  }

  regenerate(index) {
    if (this.running) return;
    this.current.leaf = this.current.nodes[index].parent;
    this.answer();
  }

  edit(index) {
    const node = this.current.nodes[index];
    const box = make("textarea", { value: node.content, rows: 4, dir: "auto", ariaLabel: "Edit the message" });
    const done = () => this.show();
    const apply = () => {
      if (node.role === "assistant") {
        this.add({ role: "assistant", parent: node.parent, content: box.value, note: "Edited." });
        this.show();
        this.save();
        return;
      }
      this.current.leaf = node.parent;
      this.add({ role: "user", parent: node.parent, content: box.value });
      this.answer();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done();
      }
    });
    const article = this.articles.get(index);
    article.replaceChildren(box, make("div", { className: "row" }, button("Save as a branch", "Save as a branch", apply), button("Cancel", "Cancel", done)));
    box.focus();
  }

  answerTool(index, call, text) {
    if (this.running) return;
    this.add({ role: "tool", parent: this.current.leaf, content: text, toolCallId: call.id });
    const answered = new Set(this.path().map((at) => this.current.nodes[at].toolCallId));
    if (this.current.nodes[index].toolCalls.every((one) => answered.has(one.id))) this.answer();
    else this.show();
    this.save();
  }

  // --- what is shown --------------------------------------------------------------------------------------------

  say(text) {
    $("status").textContent = text;
  }

  show() {
    const log = $("messages");
    const path = this.path();
    this.articles.clear();
    log.replaceChildren(...path.map((index) => this.article(index)));
    if (!path.length) log.append(make("p", { className: "faint empty" }, "Ask something. What is said stays in this browser."));
    log.scrollTop = log.scrollHeight;
    this.showList();
  }

  showList() {
    $("conversations").replaceChildren(
      ...this.conversations.map((one) => {
        const open = make("button", { type: "button", className: "quiet title", onclick: () => this.choose(one) }, one.title);
        if (one === this.current) open.setAttribute("aria-current", "true");
        const remove = button("✕", `Delete ${one.title}`, () => {
          this.conversations = this.conversations.filter((other) => other !== one);
          if (!this.conversations.length) this.conversations.push(newConversation());
          if (one === this.current) this.choose(this.conversations[0]);
          else this.show();
          this.save();
        });
        return make("li", {}, open, remove);
      }),
    );
  }

  redraw(index) {
    const log = $("messages");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.articles.get(index)?.querySelector(".body")?.replaceWith(this.body(index));
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  article(index) {
    const node = this.current.nodes[index];
    const names = { user: "You", assistant: "Model", tool: "Tool result" };
    const siblings = this.siblings(index);
    const place = siblings.indexOf(index);
    const tools = make("div", { className: "row tools" });
    if (siblings.length > 1) {
      const step = (by) => () => this.descend(siblings[(place + by + siblings.length) % siblings.length]);
      tools.append(button("‹", "Branch before", step(-1)), make("span", { className: "faint" }, `${place + 1} of ${siblings.length}`), button("›", "Next branch", step(1)));
    }
    if (node.role !== "tool") tools.append(button("Edit", "Edit this message", () => this.edit(index)));
    if (node.role === "assistant") tools.append(button("Regenerate", "Regenerate this answer", () => this.regenerate(index)));
    tools.append(button("Fork", "Continue from here in a new chat", () => this.fork(index)), button("Copy", "Copy this message", () => navigator.clipboard?.writeText(node.content)));
    const article = make("article", { className: node.role, ariaLabel: names[node.role] }, make("h2", {}, names[node.role]), this.body(index), tools);
    this.articles.set(index, article);
    return article;
  }

  body(index) {
    const node = this.current.nodes[index];
    const body = make("div", { className: "body", dir: "auto" });
    if (node.reasoning) {
      const details = make("details", { open: !node.content, dir: "auto" }, make("summary", { dir: "ltr" }, "Reasoning"), ...markdown(node.reasoning));
      body.append(details);
    }
    if (node.tokens?.length && $("logprobs").checked) body.append(this.coloured(node.tokens));
    else if (node.role === "user" || node.role === "tool") body.append(make("p", { className: "plain" }, node.content));
    else body.append(...markdown(node.content));
    for (const call of node.toolCalls ?? []) body.append(this.toolCall(index, call));
    if (node.note) body.append(make("p", { className: "faint note", dir: "ltr" }, node.note));
    else if (node.role === "assistant" && this.running) body.append(make("span", { className: "caret", ariaHidden: "true" }));
    return body;
  }

  coloured(tokens) {
    const line = make("p", { className: "plain tokens" });
    for (const token of tokens) {
      const probability = Math.exp(token.logprob);
      const others = token.top.map(([text, logprob]) => `${JSON.stringify(text)} ${(100 * Math.exp(logprob)).toFixed(1)}%`).join("\n");
      line.append(make("span", { className: `p${Math.min(9, Math.floor(10 * probability))}`, title: `${(100 * probability).toFixed(1)}%\n${others}` }, token.text));
    }
    return line;
  }

  toolCall(index, call) {
    let shown = call.arguments;
    try {
      shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
    } catch {
      // still arriving, or no JSON: as it is
    }
    const box = make("div", { className: "call", dir: "ltr" }, make("strong", {}, `${call.name}`), make("pre", { tabIndex: 0 }, shown));
    const isAnswered = this.current.nodes.some((node) => node.toolCallId === call.id);
    if (!this.running && !isAnswered) {
      const result = make("textarea", { rows: 2, placeholder: "The tool's result", ariaLabel: `Result of ${call.name}` });
      box.append(result, button("Send the result", `Send the result of ${call.name}`, () => this.answerTool(index, call, result.value)));
    }
    return box;
  }
}
