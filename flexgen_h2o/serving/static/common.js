// What both pages share: elements, asking the server, the key, units. Text from outside goes in by textContent only.

const KEY = "flexgen-h2o-key";
const TIERS = ["device", "host", "disk"];
/** What people call a tier. On a machine without a GPU the device is the CPU, and its memory is RAM. */
export const tierName = (tier, isHost) => ({ device: isHost ? "RAM" : "GPU", host: "RAM", disk: "Disk" })[tier];

export const $ = (id) => document.getElementById(id);

/** An element with properties and children; texts become text nodes. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A bar that is filled so far, with a text for those who do not see it. */
export function bar(share, label, kind = "") {
  const percent = Math.max(0, Math.min(100, 100 * share));
  const fill = el("span", { className: `fill ${kind}` });
  fill.style.width = `${percent}%`;
  return el("div", {
    className: "track", role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100",
    "aria-valuenow": percent.toFixed(0),
  }, fill);
}

/** Put these in the place of what an element has. */
export function show(parent, ...children) {
  parent.replaceChildren(...children);
}

/** "facts" as a definition list's content. */
export function facts(list, pairs) {
  show(list, ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// Units

export function bytes(count) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; count >= 1024 && power < names.length - 1; power += 1) count /= 1024;
  return `${power ? count.toPrecision(count < 1000 ? 3 : 4) : count} ${names[power]}`;
}

export function seconds(time) {
  if (time < 1) return `${Math.round(time * 1000)} ms`;
  if (time < 60) return `${time < 10 ? time.toFixed(1) : Math.round(time)} s`;
  const minutes = Math.round(time / 60);
  if (minutes < 60) return `${Math.floor(time / 60)} min ${Math.floor(time % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 100 ? `${hours} h ${minutes % 60} min` : `${(hours / 24).toFixed(1)} days`;
}

export function rate(value) {
  return value >= 1000 ? Math.round(value).toLocaleString("en") : value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

export const number = (value) => value.toLocaleString("en");

/** An eviction policy of a run report as its name and its settings. */
export function eviction(settings) {
  if (settings.name === "full") return "full cache";
  const given = Object.entries(settings).filter(([name, value]) => name !== "name" && value !== null && typeof value !== "boolean" && value !== "uniform");
  return given.length ? `${settings.name} (${given.map(([name, value]) => `${name} ${value}`).join(", ")})` : settings.name;
}

/** Rows of memory: what is used of each tier's budget. Tiers that hold nothing and may hold nothing are left out. */
export function memory(used, budgets, isHost) {
  const rows = [];
  for (const tier of TIERS) {
    const most = budgets[tier] ?? null, held = used[tier] ?? 0;
    if (!held && !most) continue;
    const share = most ? held / most : 0, name = tierName(tier, isHost);
    const text = `${bytes(held)} of ${most === null ? "no limit" : bytes(most)}`;
    rows.push(el("span", {}, name), bar(share, `${name}: ${text}`, share > 0.97 ? "full" : ""), el("span", {}, text));
  }
  return rows;
}

// The server

/** Fetch with the key; asks the reader for one where the server wants it. Throws an Error with the server's line. */
export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.status === 401) {
      if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
      continue;
    }
    if (!answer.ok) throw new Error(await reason(answer));
    return answer;
  }
}

export const post = (path, body, more = {}) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), ...more });

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answers ${answer.status}`;
  }
}

let asking = null;

function askForKey(isWrong) {
  asking ??= new Promise((done) => {
    const input = el("input", { type: "password", id: "key", required: true, autocomplete: "off" });
    const form = el("form", {},
      el("h2", {}, "This server wants a key"),
      el("label", { htmlFor: "key" }, "API key, kept in this tab until it is closed"), input,
      el("p", { className: "error", role: "alert" }, isWrong ? "The server does not know this key." : ""),
      el("button", {}, "Continue"));
    const dialog = el("dialog", { id: "ask-key" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value);
      dialog.remove();
      asking = null;
      done();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

/** A button that copies an element's text. */
export function copies(button, source) {
  button.addEventListener("click", async () => {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = before; }, 1500);
  });
}

export function state(text, kind) {
  const line = $("state");
  if (line.textContent !== text) line.textContent = text;
  line.className = kind;
}
