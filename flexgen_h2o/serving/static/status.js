// The server's page: /status once in two seconds, drawn; and prompts to try.
import { $, ask, bar, bytes, el, eviction, facts, memory, number, post, rate, seconds, show, state, svg, tierName } from "/static/common.js";

const EVERY_MS = 2000, REMEMBERED = 90;
const LANES = { compute: "compute", disk_read: "disk read", disk_write: "disk write", h2d: "RAM to GPU", d2h: "GPU to RAM", wait: "wait" };
const OVER = { completed: "good", failed: "bad", cancelled: "bad" };
const history = [];
let latest = null, sweep = null;

function speed(found) {
  const measured = found.tokens_per_s, predicted = found.predicted_tokens_per_s;
  history.push(measured);
  if (history.length > REMEMBERED) history.shift();
  const most = Math.max(measured, predicted ?? 0, 1e-9);
  $("speed").textContent = measured ? rate(measured) : "0";
  const rows = [["measured", measured, ""], ...(predicted === null ? [] : [["predicted", predicted, "soft"]])];
  show($("speeds"), ...rows.flatMap(([name, value, kind]) =>
    [el("span", {}, name), bar(value / most, `${name} tokens a second`, kind), el("span", {}, value ? rate(value) : "0")]));
  $("predicted-note").textContent = predicted === null
    ? "No prediction: the measurements of this machine lack this dtype."
    : `Predicted for ${number(found.block.rows)} prompts at a time, with up to ${number(found.model.max_model_len)} tokens each.`;
  const top = 1.08 * Math.max(predicted ?? 0, ...history, 1e-9);
  const points = history.map((value, i) => `${REMEMBERED - history.length + i} ${50 - 48 * value / top}`).join("L");
  const drawn = svg("svg", { class: "spark", viewBox: `0 0 ${REMEMBERED - 1} 50`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "area", d: `M${REMEMBERED - history.length} 50L${points}L${REMEMBERED - 1} 50Z` }), svg("path", { d: `M${points}` }));
  if (predicted !== null) drawn.append(svg("line", { x1: 0, x2: REMEMBERED - 1, y1: 50 - 48 * predicted / top, y2: 50 - 48 * predicted / top }));
  show($("spark"), drawn);
}

function engine(found) {
  const memories = memory(
    Object.fromEntries(Object.entries(found.memory).map(([tier, of]) => [tier, of.used])),
    Object.fromEntries(Object.entries(found.memory).map(([tier, of]) => [tier, of.budget])), found.model.device_is_host);
  show($("memory"), ...memories);
  const { block, policy, queue, totals } = found;
  const placed = policy && `weights: ${shares(found, 0)}; KV cache: ${shares(found, 2)}`;
  facts($("engine"), [
    ["running", `${number(block.running)} of at most ${number(block.rows)} prompts: ${block.clients} asked directly, ${block.batches} of batches`],
    ["waiting", `${number(queue.rows)} prompts that were asked directly`],
    ["KV cache", eviction(found.eviction)],
    ...(policy ? [["placement", placed], ["batch", `${number(policy.gpu_batch_size * policy.num_gpu_batches)} prompts`]] : []),
    ["since start", `${number(totals.rows)} answers, ${number(totals.tokens)} new tokens in ${seconds(found.uptime_s)}`],
    ...(found.compare ? [["second engine", `${eviction(found.compare.eviction)}, uses ${bytes(found.compare.memory.host.used + found.compare.memory.device.used)}`]] : []),
  ]);
}

function shares(found, at) {
  const [device, host] = found.policy.percent.slice(at), on = {};
  for (const [tier, share] of [["device", device], ["host", host], ["disk", 100 - device - host]]) {
    const name = tierName(tier, found.model.device_is_host);
    on[name] = (on[name] ?? 0) + share;
  }
  return Object.entries(on).filter(([, share]) => share).map(([tier, share]) => `${share}% in ${tier}`).join(" + ");
}

function jobs(found) {
  const running = found.jobs.filter((job) => !(job.status in OVER)).length;
  $("jobs-count").textContent = found.jobs.length ? `${number(running)} of ${number(found.jobs.length)} running` : "";
  if (!found.jobs.length) {
    show($("jobs"), el("p", { className: "hint" }, "No batch yet. Send a file to /v1/files and start it with /v1/batches. It survives a restart."));
    return;
  }
  const head = ["Batch", "Status", "Progress", "Prompts", "Failed", "Tokens/s", "Left"];
  const rows = found.jobs.map((job) => {
    const done = job.completed + job.failed, isOver = job.status in OVER;
    const share = job.total ? done / job.total : job.status === "completed" ? 1 : 0;
    const name = job.metadata?.name ?? job.metadata?.description;
    return el("tr", {},
      el("td", { className: "name" }, ...(name ? [name, el("small", { className: "mono" }, job.id)] : [el("span", { className: "mono" }, job.id)])),
      el("td", {}, el("span", { className: `tag ${OVER[job.status] ?? "busy"}` }, job.status.replace("_", " "))),
      el("td", { className: "wide" }, bar(share, `progress of ${job.id}`)),
      cell("Prompts", `${number(done)} / ${job.total ? number(job.total) : "?"}`),
      cell("Failed", number(job.failed)),
      cell("Tokens/s", job.tokens_per_s ? rate(job.tokens_per_s) : "–"),
      cell("Left", isOver ? "–" : job.eta_s === null ? "…" : seconds(job.eta_s)));
  });
  const cells = head.map((name, i) => el("th", { scope: "col", className: i > 2 ? "number" : "" }, name));
  show($("jobs"), el("table", { className: "cards" }, el("thead", {}, el("tr", {}, ...cells)), el("tbody", {}, ...rows)));
}

function cell(name, text) {
  return el("td", { className: "number", "data-name": name }, text);
}

function timeline(found) {
  if (found.sweep && found.timeline.length) {
    const start = Math.max(found.sweep.start, Math.min(...found.timeline.map((span) => span.start))), end = found.sweep.end;
    const seen = found.timeline.filter((span) => span.end > start && span.start < end);
    if (end > start && seen.length) sweep = { start, end, seen };
  }
  if (sweep === null) {
    show($("timeline"), el("p", { className: "hint" }, "No prompt has run since this page was opened."));
    return;
  }
  const { start, end, seen } = sweep, whole = end - start;
  const rows = [...new Set(seen.map((span) => span.row))].sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
  $("sweep-note").textContent = `${seconds(whole)} for all layers; each line shows when one kind of work ran, and its share of the time`;
  show($("timeline"), ...rows.map((row) => {
    const lane = laneOf(row), drawn = svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" });
    const pieces = joined(seen.filter((span) => span.row === row), start, end, whole / 1500);
    let busy = 0;
    for (const [from, to, names] of pieces) {
      busy += to - from;
      const title = svg("title");
      title.textContent = `${[...names].join(", ")}: ${seconds(to - from)}`;
      drawn.append(svg("rect", {
        class: `c-${lane}`, x: 1000 * (from - start) / whole, y: 0, height: 10, width: Math.max(0.8, 1000 * (to - from) / whole),
      }, title));
    }
    const percent = `${Math.round(100 * busy / whole)}%`, name = row.replace(lane, LANES[lane]).replace(/[-_]/g, " ");
    drawn.setAttribute("aria-label", `${name}: busy ${percent}`);
    return el("div", { className: "lane" }, el("span", {}, name), drawn, el("span", {}, percent));
  }));
}

const order = (row) => Object.keys(LANES).indexOf(laneOf(row));
const laneOf = (row) => Object.keys(LANES).find((lane) => row.startsWith(lane)) ?? "wait";

/** Bars of a lane: spans with no gap that one would see become one. */
function joined(spans, start, end, gap) {
  const found = [];
  for (const span of spans.sort((a, b) => a.start - b.start)) {
    const from = Math.max(span.start, start), to = Math.min(span.end, end), last = found.at(-1);
    if (last && from - last[1] < gap) {
      last[1] = Math.max(last[1], to);
      last[2].add(span.name);
    } else found.push([from, to, new Set([span.name])]);
  }
  return found;
}

async function follow() {
  for (;;) {
    if (!document.hidden) try {
      const found = await (await ask("/status")).json();
      if (latest === null) sides(found);
      latest = found;
      for (const draw of [speed, engine, jobs, timeline]) draw(found);
      state(`${found.model.id} · ${found.model.dtype}`, "good");
    } catch (error) {
      state(`no answer: ${error.message}`, "bad");
    }
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

// Prompts

// What a model is asked at first: one that chats gets a question, any other the beginning of a text.
const SAMPLES = { chat: "What is the capital of France?", text: "The capital of France is" };
const WAITS = "waits for its turn";
const TOKENS = { chat: 128, text: 48 };

function sides(found) {
  const kind = found.model.chat ? "chat" : "text", path = found.model.chat ? "/v1/chat/completions" : "/v1/completions";
  const all = [[path, found.eviction], ...(found.compare ? [[`/compare${path}`, found.compare.eviction]] : [])];
  const how = found.model.chat ? "a question or a task, as in a chat" : "a text that the model continues";
  $("try-note").textContent = found.compare
    ? `${how}. Two KV caches answer it; compare the texts, not the speeds`
    : `${how}. A server started with --compare h2o:kv_budget=0.2 answers with a small KV cache besides`;
  $("prompt").value ||= SAMPLES[kind];
  $("max-tokens").max = Math.max(1, found.model.max_model_len - 1);
  $("max-tokens").value = Math.min(TOKENS[kind], Math.max(1, Math.floor(found.model.max_model_len / 2)));
  show($("sides"), ...all.map(([to, settings]) => el("div", { className: "answer" },
    el("h3", {}, eviction(settings)),
    el("pre", { "data-path": to, "aria-live": "polite" }),
    el("p", { className: "hint" }, "\u00a0"))));
}

/** Let one side answer; returns its tokens. */
async function answer(box, body, signal) {
  const text = box.querySelector("pre"), note = box.querySelector("p"), began = performance.now(), pieces = [];
  let ended = "";
  text.textContent = "";
  note.textContent = WAITS;
  const said = () => {
    const took = (performance.now() - began) / 1000;
    return `${number(pieces.length)} tokens in ${seconds(took)}, ${rate(pieces.length / took)} tokens/s${ended}`;
  };
  const stream = (await post(text.dataset.path, body, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await stream.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      const { delta, text: more, token_ids: ids, finish_reason: reason } = piece.choices[0];
      text.textContent += delta ? (delta.reasoning_content ?? "") + (delta.content ?? "") : more;
      pieces.push(...(ids ?? []));
      if (reason === "length") ended = "; cut off there, because no more new tokens were allowed";
      note.textContent = said();
    }
  }
  if (!text.textContent.trim()) note.textContent += "; the model ended its answer without a text";
  return { text, note, pieces };
}

/** Mark from where on the texts differ. */
function compare([one, other]) {
  const [a, b] = [one.text.textContent, other.text.textContent];
  let same = 0;
  while (same < a.length && a[same] === b[same]) same += 1;
  let tokens = 0;
  while (tokens < one.pieces.length && one.pieces[tokens] === other.pieces[tokens]) tokens += 1;
  const isSame = tokens === one.pieces.length && tokens === other.pieces.length;
  for (const { text, note } of [one, other]) {
    const all = text.textContent;
    show(text, all.slice(0, same), ...(same < all.length ? [el("mark", {}, all.slice(same))] : []));
    note.textContent += isSame ? "; the same text" : `; the first ${number(tokens)} tokens are the same`;
  }
}

let stopping = null;

$("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (latest === null) return; // the server has not answered yet
  stopping = new AbortController();
  $("try-error").textContent = "";
  $("run").disabled = true;
  $("stop").hidden = false;
  const asked = $("prompt").value, body = { max_tokens: Number($("max-tokens").value), temperature: 0, stream: true };
  if (latest.model.chat) body.messages = [{ role: "user", content: asked }];
  else body.prompt = asked;
  try {
    const done = await Promise.all([...$("sides").children].map((box) => answer(box, body, stopping.signal)));
    if (done.length === 2) compare(done);
  } catch (error) {
    const isStopped = stopping.signal.aborted;
    stopping.abort();
    if (!isStopped) $("try-error").textContent = `No answer: ${error.message}`;
    for (const note of $("sides").querySelectorAll(".answer > p")) {
      if (note.textContent === WAITS) note.textContent = "\u00a0";
    }
  } finally {
    $("run").disabled = false;
    $("stop").hidden = true;
  }
});
$("stop").addEventListener("click", () => stopping.abort());

follow();
