// The server's page: /status once in two seconds, drawn; and prompts to try.
import { $, ask, bar, bytes, el, eviction, facts, memory, number, post, rate, seconds, show, state, svg } from "/static/common.js";

const EVERY_MS = 2000, REMEMBERED = 90;
const LANES = { compute: "compute", disk_read: "disk read", disk_write: "disk write", h2d: "to device", d2h: "from device", wait: "wait" };
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
    ? "No prediction: the profile of this machine does not know this dtype."
    : `Predicted: of a block of ${number(found.block.rows)} rows, filled up to ${number(found.model.max_model_len)} tokens each.`;
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
    Object.fromEntries(Object.entries(found.memory).map(([tier, of]) => [tier, of.budget])));
  show($("memory"), ...memories);
  const { block, policy, queue, totals } = found;
  const placed = policy && `weights ${shares(policy.percent, 0)}, KV ${shares(policy.percent, 2)}`;
  facts($("engine"), [
    ["block", `${number(block.running)} of ${number(block.rows)} rows run: ${block.clients} of clients, ${block.batches} of jobs`],
    ["queue", `${number(queue.rows)} rows of clients wait`],
    ["eviction", eviction(found.eviction)],
    ...(policy ? [["placement", placed], ["block size", `${policy.gpu_batch_size} × ${policy.num_gpu_batches}`]] : []),
    ["since start", `${number(totals.rows)} rows, ${number(totals.tokens)} new tokens in ${seconds(found.uptime_s)}`],
    ...(found.compare ? [["beside it", `${eviction(found.compare.eviction)}, holds ${bytes(found.compare.memory.host.used + found.compare.memory.device.used)}`]] : []),
  ]);
}

function shares(percent, at) {
  const on = { device: percent[at], RAM: percent[at + 1], disk: 100 - percent[at] - percent[at + 1] };
  return Object.entries(on).filter(([, share]) => share).map(([tier, share]) => `${share}% ${tier}`).join(" + ");
}

function jobs(found) {
  const running = found.jobs.filter((job) => !(job.status in OVER)).length;
  $("jobs-count").textContent = found.jobs.length ? `${number(running)} of ${number(found.jobs.length)} running` : "";
  if (!found.jobs.length) {
    show($("jobs"), el("p", { className: "hint" }, "No job yet. Send a file to /v1/files and start it with /v1/batches; it survives a restart."));
    return;
  }
  const head = ["Job", "Status", "Progress", "Rows", "Failed", "Tokens/s", "Left"];
  const rows = found.jobs.map((job) => {
    const done = job.completed + job.failed, isOver = job.status in OVER;
    const share = job.total ? done / job.total : job.status === "completed" ? 1 : 0;
    const name = job.metadata?.name ?? job.metadata?.description;
    return el("tr", {},
      el("td", { className: "name" }, ...(name ? [name, el("small", { className: "mono" }, job.id)] : [el("span", { className: "mono" }, job.id)])),
      el("td", {}, el("span", { className: `tag ${OVER[job.status] ?? "busy"}` }, job.status.replace("_", " "))),
      el("td", { className: "wide" }, bar(share, `progress of ${job.id}`)),
      cell("Rows", `${number(done)} / ${job.total ? number(job.total) : "?"}`),
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
    show($("timeline"), el("p", { className: "hint" }, "Nothing has run since this page was opened."));
    return;
  }
  const { start, end, seen } = sweep, whole = end - start;
  const rows = [...new Set(seen.map((span) => span.row))].sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
  $("sweep-note").textContent = `${seconds(whole)} through all layers; the share is how long a lane was busy`;
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

function sides(found) {
  const all = [["/v1/completions", found.eviction], ...(found.compare ? [["/compare/v1/completions", found.compare.eviction]] : [])];
  $("try-note").textContent = found.compare
    ? "greedy, with both eviction policies at once; compare the texts, not the speeds: only the first shares its block with jobs"
    : "greedy; start the server with --compare NAME (full, or h2o:kv_budget=0.2) to see another eviction policy beside it";
  $("max-tokens").value = Math.min(48, Math.max(1, Math.floor(found.model.max_model_len / 2)));
  show($("sides"), ...all.map(([path, settings]) => el("div", { className: "answer" },
    el("h3", {}, eviction(settings)),
    el("pre", { "data-path": path, "aria-live": "polite" }),
    el("p", { className: "hint" }, "\u00a0"))));
}

/** Let one side answer; returns its tokens. */
async function answer(box, body, signal) {
  const text = box.querySelector("pre"), note = box.querySelector("p"), began = performance.now(), pieces = [];
  text.textContent = "";
  note.textContent = "waits for a place in the block";
  const said = () => {
    const took = (performance.now() - began) / 1000;
    return `${number(pieces.length)} tokens in ${seconds(took)}, ${rate(pieces.length / took)} tokens/s`;
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
      const choice = piece.choices[0];
      text.textContent += choice.text;
      pieces.push(...(choice.token_ids ?? []));
      note.textContent = said();
    }
  }
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
  stopping = new AbortController();
  $("try-error").textContent = "";
  $("run").disabled = true;
  $("stop").hidden = false;
  const body = { prompt: $("prompt").value, max_tokens: Number($("max-tokens").value), temperature: 0, stream: true };
  try {
    const done = await Promise.all([...$("sides").children].map((box) => answer(box, body, stopping.signal)));
    if (done.length === 2) compare(done);
  } catch (error) {
    stopping.abort();
    if (error.name !== "AbortError") $("try-error").textContent = error.message;
  } finally {
    $("run").disabled = false;
    $("stop").hidden = true;
  }
});
$("stop").addEventListener("click", () => stopping.abort());

follow();
