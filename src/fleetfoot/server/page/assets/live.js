// The view of the engine: one stream of events, drawn on canvases, with the same numbers as text.

import { events, request, save } from "./stream.js";

const $ = (id) => document.getElementById(id);
const WINDOW_S = 20;
const KEEP_S = 30;
const SAY_MS = 5000;
const LANE_PX = 16;

const node = (name, text = "", className = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
};
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "none yet");
const count = (number) => Math.round(number).toLocaleString("en-US");

// What is known of one engine.
class Engine {
  constructor() {
    this.steps = [];
    this.lanes = new Map();
    this.samples = [];
    this.seen = null;
    this.plan = null;
    this.offset = 0;
  }

  take(seen) {
    this.seen = seen;
    this.plan = seen.plan ?? this.plan;
    // the engine's clock is not the browser's: the latest event is now
    this.offset = seen.now - performance.now() / 1000;
    for (const [began, seconds, batch, decodes, prompt, drafted, accepted, begun, chunks, left] of seen.steps) {
      this.steps.push({ began, seconds, batch, decodes, prompt, drafted, accepted });
      const end = began + seconds;
      for (const [lane, isPreempted] of left) this.close(lane, began, isPreempted ? "lost" : "end");
      for (const [lane, prompt] of begun) {
        const known = this.lane(lane);
        known.prompt = prompt;
        known.admitted ??= began;
        if (known.lostFrom !== undefined) this.segment(known, "lost", known.lostFrom, began);
        known.lostFrom = undefined;
      }
      for (const [lane, tokens] of chunks) {
        const known = this.lane(lane);
        this.segment(known, "prompt", began, end, tokens);
        known.decodesFrom = end;
      }
    }
    for (const [lane, output, drafted, accepted, cached] of seen.ended) {
      const known = this.lanes.get(lane);
      if (known) Object.assign(known, { output, drafted, accepted, cached });
    }
    const live = new Set();
    for (const [lane, state, prompt, computed, output, drafted, accepted, cached, preemptions, age] of seen.lanes) {
      live.add(lane);
      const known = this.lane(lane);
      known.queued ??= seen.now - age;
      Object.assign(known, { state, prompt, computed, output, drafted, accepted, preemptions, cached, live: true });
      if (state === "d") known.decodesFrom ??= known.admitted ?? seen.now;
    }
    for (const [lane, known] of this.lanes) {
      if (!live.has(lane) && known.live) this.close(lane, seen.now, "end");
      if (!known.live && known.ended < seen.now - KEEP_S) this.lanes.delete(lane);
    }
    this.steps = this.steps.filter((step) => step.began > seen.now - KEEP_S);
    this.samples.push({ at: seen.now, running: seen.running, waiting: seen.waiting, output: seen.generation_tokens, prompt: seen.prompt_tokens });
    this.samples = this.samples.filter((sample) => sample.at > seen.now - KEEP_S);
  }

  lane(number) {
    if (!this.lanes.has(number)) this.lanes.set(number, { segments: [], live: true, state: "p" });
    return this.lanes.get(number);
  }

  segment(lane, kind, begin, end, tokens = 0) {
    lane.segments.push({ kind, begin, end, tokens });
    if (lane.segments.length > 400) lane.segments.shift();
  }

  close(number, at, how) {
    const lane = this.lanes.get(number);
    if (!lane) return;
    if (lane.decodesFrom !== undefined) this.segment(lane, "decode", lane.decodesFrom, at);
    lane.decodesFrom = undefined;
    if (how === "lost") lane.lostFrom = at;
    else Object.assign(lane, { live: false, ended: at });
  }

  rates() {
    return this.samples.slice(1).map((sample, index) => {
      const before = this.samples[index];
      const seconds = sample.at - before.at || 1;
      return { at: sample.at, output: (sample.output - before.output) / seconds, prompt: (sample.prompt - before.prompt) / seconds };
    });
  }
}

export class Live {
  constructor() {
    this.engines = new Map();
    this.running = null;
    this.isVisible = false;
    this.lastSaid = 0;
    $("admin").addEventListener("submit", (event) => {
      event.preventDefault();
      try {
        sessionStorage.setItem("fleetfoot.admin", $("admin-key").value);
      } catch {
        // for this visit
      }
      this.watch();
    });
    $("pause").addEventListener("click", () => this.stop("Stopped."));
    $("trace").addEventListener("click", () => this.saveTrace());
    $("engines").addEventListener("change", () => this.showEngine());
    addEventListener("resize", () => this.redraw());
    document.addEventListener("visibilitychange", () => this.setVisible(this.isVisible));
    try {
      $("admin-key").value = sessionStorage.getItem("fleetfoot.admin") ?? "";
    } catch {
      // a browser without storage
    }
  }

  // Look at the engine only while the view is on the screen.
  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (!isVisible || document.hidden) this.stop("");
    else if ($("admin-key").value && !this.running) this.watch();
    else this.redraw();
  }

  say(text) {
    $("live-status").textContent = text;
  }

  stop(reason) {
    this.running?.abort();
    this.running = null;
    $("pause").disabled = $("trace").disabled = true;
    this.say(reason);
  }

  async watch() {
    this.stop("");
    const running = new AbortController();
    this.running = running;
    $("pause").disabled = $("trace").disabled = false;
    this.say("Connecting…");
    this.engines.clear();
    try {
      const response = await request("live/events", { key: $("admin-key").value.trim(), signal: running.signal });
      this.say("Watching.");
      $("panels").hidden = false;
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        if (this.running !== running) return;
        for (const seen of event.engines) {
          if (!this.engines.has(seen.engine)) this.engines.set(seen.engine, new Engine());
          this.engines.get(seen.engine).take(seen);
        }
        this.listEngines();
        this.showNumbers();
        requestAnimationFrame(() => this.redraw());
      }
      if (this.running === running) this.stop("The server has ended the stream.");
    } catch (error) {
      if (this.running !== running) return;
      const reasons = {
        401: "The admin key is missing or wrong.",
        404: "This server has no view of its engine: start it with --enable-admin-routes and --admin-key.",
      };
      this.stop(error.name === "AbortError" ? "" : (reasons[error.status] ?? error.message));
    }
  }

  async saveTrace() {
    $("trace").disabled = true;
    const { running } = this;
    this.say("Recording 5 seconds…");
    try {
      const response = await request("live/trace?seconds=5", { key: $("admin-key").value.trim() });
      save(await response.blob(), "steps.json");
      this.say("Watching. steps.json is for ui.perfetto.dev.");
    } catch (error) {
      this.say(error.message);
    }
    $("trace").disabled = !this.running || this.running !== running;
  }

  listEngines() {
    const names = [...this.engines.keys()];
    $("engine-choice").hidden = names.length < 2;
    if ($("engines").options.length !== names.length) {
      $("engines").replaceChildren(...names.map((name) => new Option(name, name)));
      this.showEngine();
    }
  }

  get engine() {
    return this.engines.get($("engines").value) ?? this.engines.values().next().value;
  }

  showEngine() {
    const plan = this.engine?.plan;
    if (!plan) return;
    const facts = [
      ["Model", `${plan.model} (${plan.architecture}, ${count(plan.parameters)} parameters)`],
      ["Runner", `Model Runner ${plan.runner.toUpperCase()}${plan.is_explicit ? ", the user's choice" : ""}`],
      ["Runs on", `${plan.device} in ${plan.dtype}, executor ${plan.executor}, ranks ${plan.ranks.join(" × ")} (tensor, pipeline, data)`],
      ["KV", `${count(plan.kv_blocks)} blocks of ${plan.block_size} tokens in ${plan.kv_dtype}, layout ${plan.kv_layout}: ${plan.kv_reason}`],
      ["Limits", `${count(plan.max_model_len)} tokens a request, ${count(plan.max_num_seqs)} requests and ${count(plan.max_num_batched_tokens)} tokens a step`],
      ["Steps", plan.overlaps_steps ? "the next one is scheduled while one runs" : "one after the other"],
      ["Drafts", plan.drafter ?? "none"],
      ["KV connector", plan.connector ?? "none"],
      ["Layers", Object.entries(plan.layers).map(([kind, number]) => `${number} ${kind}`).join("; ")],
    ];
    const terms = node("dl");
    for (const [name, text] of facts) terms.append(node("dt", name), node("dd", text));
    const reasons = node("ul");
    reasons.append(...plan.reasons.map((reason) => node("li", reason)));
    const warnings = node("ul", "", "warnings");
    warnings.append(...plan.warnings.map((warning) => node("li", warning)));
    const kernels = node("details");
    const names = node("dl");
    for (const [operation, name] of Object.entries(plan.kernels)) names.append(node("dt", operation), node("dd", name));
    kernels.append(node("summary", "Kernels"), names);
    $("plan").replaceChildren(terms, node("h3", "Why this runner"), reasons, ...(plan.warnings.length ? [node("h3", "Warnings"), warnings] : []), kernels);
    this.redraw();
  }

  showNumbers() {
    const { engine } = this;
    const seen = engine?.seen;
    if (!seen) return;
    const rate = engine.rates().slice(-8);
    const mean = (name) => rate.reduce((sum, one) => sum + one[name], 0) / (rate.length || 1);
    const recent = engine.steps.filter((step) => step.began > seen.now - 2);
    const rows = [
      ["Running / waiting", `${count(seen.running)} / ${count(seen.waiting)}`],
      ["Output tokens each second", count(mean("output"))],
      ["Prompt tokens each second", count(mean("prompt"))],
      ["Step, mean of 2 s", recent.length ? `${((1000 * recent.reduce((sum, step) => sum + step.seconds, 0)) / recent.length).toFixed(2)} ms` : "idle"],
      ["Prefix hits, of prompt tokens", share(seen.prefix[1], seen.prefix[0])],
      ...(seen.prefix[2] ? [["Hits lost for want of a state", count(seen.prefix[2])]] : []),
      ...(engine.plan?.drafter ? [["Drafts accepted", share(seen.drafts[1], seen.drafts[0])]] : []),
      ...(seen.drafts[2] ? [["No drafts because", seen.drafts[2]]] : []),
      ["Preemptions", count(seen.preemptions)],
      ["KV loads / held blocks", `${seen.transfers[0]} / ${seen.transfers[1]}`],
      ["Finished", Object.entries(seen.finished).map(([reason, number]) => `${reason} ${count(number)}`).join(", ") || "none"],
      ...(seen.missed ? [["Steps not shown", count(seen.missed)]] : []),
    ];
    const body = $("numbers").tBodies[0];
    body.replaceChildren(
      ...rows.map(([name, text]) => {
        const row = node("tr");
        const head = node("th", name);
        head.scope = "row";
        row.append(head, node("td", text));
        return row;
      }),
    );
    this.showMeters($("kv"), seen.kv.flatMap((groups, rank) => groups.map(([kind, used, cached, total]) => ({
      title: `${seen.kv.length > 1 ? `rank ${rank}, ` : ""}${kind}`, parts: [["used", used / total], ["cached", cached / total]],
      text: `${count(used)} used, ${count(cached)} cached, ${count(total - used - cached)} free of ${count(total)} blocks`,
    }))));
    $("experts").parentElement.hidden = !seen.experts;
    if (seen.experts) {
      const most = Math.max(...seen.experts.loads, 1e-9);
      this.showMeters($("experts"), seen.experts.loads.map((load, rank) => ({ title: `rank ${rank}`, parts: [["used", load / most]], text: share(load, 1) })));
      $("experts").append(node("p", `balancedness ${seen.experts.balancedness.toFixed(3)} (least ${seen.experts.least.toFixed(3)}, expected ${seen.experts.expected.toFixed(3)}), ${count(seen.experts.rounds)} rounds, ${count(seen.experts.moved)} moved`, "faint"));
    }
  }

  showMeters(box, meters) {
    box.replaceChildren(
      ...meters.map(({ title, parts, text }) => {
        const line = node("div", "", "meter");
        const bar = node("div", "", "bar");
        for (const [kind, size] of parts) {
          const part = node("div", "", kind);
          part.style.width = `${(100 * size).toFixed(2)}%`;
          bar.append(part);
        }
        line.append(node("span", title), bar, node("span", text, "faint"));
        return line;
      }),
    );
  }

  // --- canvases -------------------------------------------------------------------------------------------------

  redraw() {
    const { engine } = this;
    if (!engine?.seen || $("live").hidden || $("panels").hidden) return;
    // colours depend on the scheme, which an element's own colour resolves
    const style = getComputedStyle($("probe"));
    const color = (name) => {
      $("probe").style.color = `var(--${name})`;
      return style.color;
    };
    this.unit = parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
    this.colors = Object.fromEntries(["ink", "faint", "line", "decode", "prompt", "queued", "lost", "used"].map((name) => [name, color(name)]));
    const isTime = performance.now() - this.lastSaid > SAY_MS;
    if (isTime) this.lastSaid = performance.now();
    this.say_ = (canvas, text) => isTime && canvas.setAttribute("aria-label", text);
    this.drawSteps(engine);
    this.drawLanes(engine);
    this.drawLines($("batch"), engine.samples, [["running", "decode"], ["waiting", "queued"]], engine.seen.now);
    this.drawLines($("rates"), engine.rates(), [["output", "decode"], ["prompt", "prompt"]], engine.seen.now);
    this.drawHistogram($("ttft"), engine.seen.latencies.ttft);
    this.drawHistogram($("itl"), engine.seen.latencies.itl);
  }

  // A canvas of its box's size in device pixels, and its context in pixels of a page with the usual size of text.
  begin(canvas, height) {
    const ratio = (devicePixelRatio || 1) * this.unit;
    const width = canvas.clientWidth / this.unit;
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height * this.unit}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = this.colors.faint;
    return { context, width, height };
  }

  axis({ context, width, height }, most) {
    context.fillStyle = this.colors.faint;
    context.textAlign = "left";
    context.fillText(count(most), 2, 11);
    context.fillText(`${WINDOW_S} s ago`, 2, height - 3);
    context.textAlign = "right";
    context.fillText("now", width - 2, height - 3);
    context.strokeStyle = this.colors.line;
    context.strokeRect(0, height - 15.5, width, 0);
  }

  drawSteps(engine) {
    const canvas = $("steps");
    const drawn = this.begin(canvas, 120);
    const { context, width, height } = drawn;
    const begin = engine.seen.now - WINDOW_S;
    const steps = engine.steps.filter((step) => step.began + step.seconds > begin);
    const sizes = steps.map((step) => [step, Math.max(step.batch, step.decodes) && step.decodes + step.prompt]);
    const most = Math.max(1, ...sizes.map(([, size]) => size));
    const scale = width / WINDOW_S;
    // the square root shows steps of a few decodes beside those of long prompts
    const tall = (tokens) => (height - 32) * Math.sqrt(tokens / most);
    for (const [step, size] of sizes) {
      const x = (step.began - begin) * scale;
      const wide = Math.max(1, step.seconds * scale - 0.5);
      context.fillStyle = this.colors.prompt;
      context.fillRect(x, height - 16 - tall(size), wide, tall(size));
      context.fillStyle = this.colors.decode;
      context.fillRect(x, height - 16 - tall(step.decodes), wide, tall(step.decodes));
    }
    this.axis(drawn, most);
    this.say_(canvas, `${steps.length} steps in the last ${WINDOW_S} seconds, at most ${most} tokens each`);
  }

  drawLanes(engine) {
    const canvas = $("lanes");
    const { now } = engine.seen;
    const begin = now - WINDOW_S;
    const lanes = [...engine.lanes].filter(([, lane]) => lane.live || lane.ended > begin).sort(([a], [b]) => a - b).slice(-48);
    const drawn = this.begin(canvas, Math.max(4, lanes.length) * LANE_PX + 20);
    const { context, width, height } = drawn;
    const right = Math.min(170, width * 0.38);
    const scale = (width - right) / WINDOW_S;
    const box = (kind, from, to, y) => {
      const x = Math.max(0, (from - begin) * scale);
      const end = Math.min(width - right, (to - begin) * scale);
      if (end <= x) return;
      context.fillStyle = this.colors[kind];
      context.fillRect(x, y, Math.max(1, end - x), LANE_PX - 4);
    };
    for (const [place, [, lane]] of lanes.entries()) {
      const y = place * LANE_PX + 2;
      const end = lane.live ? now : lane.ended;
      if (lane.queued !== undefined) box("queued", lane.queued, lane.admitted ?? (lane.state === "w" ? end : lane.queued), y);
      for (const segment of lane.segments) box(segment.kind, segment.begin, segment.end, y);
      if (lane.lostFrom !== undefined) box("lost", lane.lostFrom, end, y);
      if (lane.live && lane.decodesFrom !== undefined && lane.state === "d") box("decode", lane.decodesFrom, now, y);
      context.fillStyle = this.colors.ink;
      context.textAlign = "left";
      const drafts = lane.drafted ? `, ${lane.accepted}/${lane.drafted - lane.accepted}` : "";
      const cached = lane.cached ? ` (${count(lane.cached)} cached)` : "";
      const output = lane.output === undefined ? "" : ` → ${count(lane.output)}`;
      context.fillText(`${count(lane.prompt ?? 0)}${cached}${output}${drafts}`, width - right + 6, y + LANE_PX - 6, right - 8);
    }
    this.axis({ context, width: width - right, height }, lanes.length);
    const states = { w: 0, p: 0, d: 0, x: 0 };
    for (const [, lane] of lanes) if (lane.live) states[lane.state] += 1;
    this.say_(canvas, `${states.d} requests decode, ${states.p} compute their prompts, ${states.w} wait, ${states.x} are preempted`);
  }

  drawLines(canvas, samples, curves, now) {
    const drawn = this.begin(canvas, 110);
    const { context, width, height } = drawn;
    const shown = samples.filter((sample) => sample.at > now - WINDOW_S);
    const most = Math.max(1, ...shown.flatMap((sample) => curves.map(([name]) => sample[name])));
    for (const [name, color] of curves) {
      context.strokeStyle = this.colors[color];
      context.lineWidth = 2;
      context.beginPath();
      for (const sample of shown) {
        context.lineTo(((sample.at - now + WINDOW_S) / WINDOW_S) * width, height - 16 - ((height - 32) * sample[name]) / most);
      }
      context.stroke();
    }
    context.lineWidth = 1;
    this.axis(drawn, most);
    const last = shown.at(-1) ?? {};
    this.say_(canvas, curves.map(([name]) => `${name} ${count(last[name] ?? 0)}`).join(", "));
  }

  drawHistogram(canvas, cumulative) {
    const { context, width, height } = this.begin(canvas, 110);
    const counts = cumulative.map(([limit, total], index) => [limit, total - (cumulative[index - 1]?.[1] ?? 0)]);
    const used = counts.flatMap(([, number], index) => (number ? [index] : []));
    const shown = counts.slice(Math.max(0, (used[0] ?? 0) - 1), (used.at(-1) ?? 5) + 2);
    const most = Math.max(1, ...shown.map(([, number]) => number));
    const wide = width / shown.length;
    const label = (limit) => (limit === "+Inf" ? "more" : Number(limit) < 1 ? `${+(1000 * limit).toPrecision(3)} ms` : `${Number(limit)} s`);
    context.textAlign = "center";
    const every = Math.ceil(58 / wide);
    for (const [index, [limit, number]] of shown.entries()) {
      context.fillStyle = this.colors.used;
      const tall = ((height - 32) * number) / most;
      context.fillRect(index * wide + 1, height - 16 - tall, wide - 2, tall);
      context.fillStyle = this.colors.faint;
      if (index % every) continue;
      const text = `≤ ${label(limit)}`.replace("≤ more", "more");
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max((index + 0.5) * wide, half), width - half), height - 3, wide * every);
    }
    context.textAlign = "left";
    context.fillText(count(most), 2, 11);
    const total = cumulative.at(-1)?.[1] ?? 0;
    const median = cumulative.find(([, upTo]) => upTo >= total / 2)?.[0] ?? "";
    this.say_(canvas, total ? `${count(total)} samples, half of them up to ${label(median)}` : "no samples yet");
  }
}
