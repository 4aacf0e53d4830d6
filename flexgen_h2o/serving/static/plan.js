// The planner's page: a question as JSON to /api/plan, and its answer drawn.
import { $, ask, bar, bytes, copies, el, memory, number, post, rate, seconds, show, state } from "/static/common.js";

const OWN = "measurements in a file …";
// Machines that no one has measured, by the planner's name.
const NOMINAL = { "some card": "a GPU of round figures", "some CPU": "a CPU of round figures" };
const RESOURCES = {
  disk_read: "disk read", disk_write: "disk write", h2d: "RAM to GPU", d2h: "GPU to RAM",
  device_compute: "GPU compute", host_compute: "CPU compute",
};
const RESOURCES_OF_CPU = { ...RESOURCES, device_compute: "CPU compute" };
const FIELDS = ["num_prompts", "prompt_len", "gen_len", "device_mem", "host_mem", "disk_mem"];
const PHASES = { prefill: "reading the prompts (prefill)", decode: "new tokens (decode)" };
const NIGHT_S = 10 * 3600;
let machines = {};

async function begin() {
  try {
    const found = await (await ask("/api/plan")).json();
    machines = Object.fromEntries(found.machines.map((machine) => [machine.name, machine]));
    show($("models"), ...found.models.map((name) => el("option", { value: name })));
    $("model").value ||= found.has_engine ? found.models[0] : "facebook/opt-30b";
    const labels = found.machines.map(({ name }) => el("option", { value: name }, NOMINAL[name] ?? name));
    show($("machine"), ...labels, el("option", { value: OWN }, OWN));
    if (found.machine in machines) $("machine").value = found.machine;
    $("status-link").hidden = !found.has_engine;
    choose();
    state("planner", "good");
  } catch (error) {
    state(`no answer: ${error.message}`, "bad");
  }
}

function choose() {
  const machine = machines[$("machine").value];
  $("profile-label").hidden = machine !== undefined;
  $("device-label").hidden = machine?.device_is_host ?? false;
  for (const tier of ["device", "host", "disk"]) {
    const there = machine?.memory[tier];
    $(`${tier}_mem`).placeholder = there ? bytes(there) : "all of it";
    if (tier === "device" && machine?.device_is_host) $("device_mem").value = "";
  }
  const source = machine?.date ? `figures of ${machine.date}` : "round figures, not measured";
  $("machine-note").textContent = machine ? `${machine.description}; ${source}. An empty memory field means all of it, less a margin.` : "";
}

async function question() {
  const body = { model: $("model").value.trim(), ...JSON.parse($("kv").value) };
  for (const name of FIELDS) if ($(name).value.trim()) body[name] = $(name).value.trim().replace(/\s+/g, "");
  if ($("compress_weight").checked) body.compress_weight = true;
  if ($("machine").value !== OWN) return { ...body, machine: $("machine").value };
  const file = $("profile").files[0];
  if (!file) throw new Error("measurements: choose the file that flexgen-h2o hardware --output has written");
  try {
    return { ...body, profile: JSON.parse(await file.text()) };
  } catch {
    throw new Error(`measurements: ${file.name} is not JSON`);
  }
}

function draw(found) {
  const { details, predicted } = found, work = details.workload;
  const names = details.device_is_host ? RESOURCES_OF_CPU : RESOURCES;
  $("about").textContent = `${details.model} in ${details.dtype} on ${NOMINAL[details.profile.machine] ?? details.profile.machine}`;
  $("answer").hidden = !found.fits;
  if (!found.fits) throw new Error(details.problem ?? "nothing fits");
  $("hours").textContent = seconds(found.eta_s);
  $("pace").textContent = `for ${number(work.num_prompts)} prompts, ${rate(predicted.tokens_per_s)} new tokens per second`;
  const phases = ["prefill", "decode"].filter((phase) => predicted[`${phase}_s`] > 0);
  show($("bound"), "The bottleneck: ", ...phases.flatMap((phase, i) => [i ? "; " : "", `${PHASES[phase]}: `, el("strong", {}, names[details.binds[phase]])]), ".");
  const nights = found.eta_s / NIGHT_S;
  $("night").textContent = nights > 1
    ? `A night of 10 hours does ${number(Math.floor(work.num_prompts / nights))} prompts; all take ${nights.toFixed(1)} nights.` : "";
  show($("busy"), ...phases.flatMap((phase) => {
    const whole = predicted[`${phase}_s`];
    const rows = Object.keys(names).filter((name) => details.busy_s[phase][name] > 0).flatMap((name) => {
      const share = details.busy_s[phase][name] / whole, binds = details.binds[phase] === name;
      const text = `${seconds(details.busy_s[phase][name])} (${Math.round(100 * share)}%)`;
      return [el(binds ? "b" : "span", {}, names[name]), bar(share, `${PHASES[phase]}, ${names[name]}`, binds ? "" : "soft"), el("span", {}, text)];
    });
    return [el("span", { className: "head" }, `${PHASES[phase]}: ${seconds(whole)}`), ...rows];
  }));
  show($("memory"), ...memory(predicted.peak_bytes, details.budget_bytes, details.device_is_host));
  $("command").textContent = found.command;
  $("text").textContent = found.text;
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("error").textContent = "";
  $("plan").disabled = true;
  $("answer").hidden = true;
  $("waiting").hidden = false;
  $("searching").hidden = false;
  const began = performance.now();
  const tick = () => {
    const took = Math.round((performance.now() - began) / 1000);
    $("waiting").textContent = `Searching for the fastest plan: ${took} s so far. Most searches end within a minute.`;
  };
  const clock = setInterval(tick, 1000);
  tick();
  $("about").textContent = "";
  try {
    draw(await (await post("/api/plan", await question())).json());
  } catch (error) {
    $("error").textContent = error.message;
  } finally {
    clearInterval(clock);
    $("searching").hidden = true;
    $("plan").disabled = false;
    $("waiting").hidden = !$("answer").hidden;
    $("waiting").textContent = "No plan.";
  }
});
$("machine").addEventListener("change", choose);
copies($("copy"), $("command"));
begin();
