// The page: a conversation with the server, and what speculation does to it.

import { Answer, make, verdict } from "./answer.js";
import { drawSpeed, drawSteps } from "./charts.js";
import { Failure, call, key, stream } from "./client.js";

const $ = (id) => document.getElementById(id);
const CHAT = "/v1/chat/completions";
const AGAIN = 2000; // milliseconds between two questions whether the server is ready
const narrow = matchMedia("(max-width: 900px)");

let server = null; // what it says of itself
let running = null; // AbortController of the answer that is being made
let turns = []; // {text, images, answer, element}; answer is null where none came
let images = []; // {name, url} that go with the next message

// The server

async function connect() {
  for (;;) {
    try {
      server = await (await call("/server_info")).json();
      return introduce();
    } catch (failure) {
      if (!(failure instanceof Failure)) throw failure;
      if (failure.status === 401) {
        await askKey(key.get() ? failure.message : "");
      } else {
        state(failure.status === 503 ? "waiting" : "bad", failure.message);
        await new Promise((resolve) => setTimeout(resolve, AGAIN));
      }
    }
  }
}

function introduce() {
  const facts = [server.dtype, server.device, `context ${server.context_length.toLocaleString("en")}`];
  $("model").replaceChildren(make("b", "", server.served_model_name), ` · ${facts.join(" · ")}`);
  const drafts = server.speculative_num_steps !== null && server.speculation !== "off";
  $("speculation").checked &&= drafts;
  $("speculation").disabled = !drafts;
  $("drafts").textContent = drafts
    ? `${server.speculation}: ${server.speculative_num_steps} steps, top-k ${server.speculative_eagle_topk}, ` +
      `${server.speculative_num_draft_tokens} draft tokens`
    : "this server does not speculate";
  $("picking").hidden = !server.has_image_understanding;
  state("ready", "ready");
  settle();
}

function state(kind, words) {
  $("state").dataset.is = kind;
  $("state").textContent = words;
}

/** Waits until somebody has given a key. */
function askKey(refusal) {
  state("bad", "locked");
  $("refusal").textContent = refusal;
  $("key").value = "";
  if (!$("door").open) $("door").showModal();
  return new Promise((resolve) => {
    $("unlock").onsubmit = (event) => {
      event.preventDefault();
      key.set($("key").value.trim());
      $("door").close();
      resolve();
    };
  });
}

// Asking

function send() {
  const text = $("ask").value.trim();
  if (!ready() || !(text || images.length)) return;
  begin(text, images, [$("speculation").checked]);
}

/** Both ways, one after another; with nothing to ask, the last question again. */
function compare() {
  if (!ready()) return;
  const text = $("ask").value.trim();
  if (text || images.length) return void begin(text, images, [false, true]);
  const last = turns.pop();
  if (!last) return;
  last.element.remove();
  begin(last.text, last.images, [false, true]);
}

const ready = () => server !== null && running === null && $("composer").reportValidity();

async function begin(text, pictures, ways) {
  const turn = { text, images: pictures, answer: null, element: make("section", "turn") };
  const request = { ...settings(), messages: [...history(), { role: "user", content: content(turn) }] };
  const answers = make("div", "answers");
  turn.element.append(question(turn), answers);
  $("empty").hidden = true;
  $("log").append(turn.element);
  turns.push(turn);
  take([], "");
  running = new AbortController();
  settle();
  scroll(true);
  try {
    await answerAll(turn, answers, request, ways);
  } finally {
    running = null;
    settle();
  }
  if (turn.answer === null && !$("ask").value && !images.length) take(pictures, text); // to try again
  if (!narrow.matches) $("ask").focus();
}

async function answerAll(turn, place, request, ways) {
  const all = [];
  for (const speculates of ways) {
    const answer = new Answer(speculates, request.seed);
    all.push(answer);
    place.append(answer.element);
    await follow(answer, { ...request, speculation: speculates ? "auto" : "off" }, all);
    if (answer.pieces.length) turn.answer = answer.text;
    if (!answer.whole) return;
  }
  if (all.length === 2) place.append(verdict(...all, server.dtype));
  scroll();
}

/** One request, until it has ended one way or another. */
async function follow(answer, request, all) {
  const shown = every(() => show(answer, all));
  try {
    for await (const event of stream(CHAT, request, running.signal)) {
      answer.take(event);
      shown.soon();
      scroll();
    }
    answer.end();
  } catch (error) {
    if (error.name === "AbortError") answer.end("stopped");
    else if (error instanceof Failure) answer.fail(error.message);
    else throw error;
    if (error.status === 401) connect(); // asks for another key
  }
  shown.now();
  scroll();
}

/** The fields that are filled in; the seed is chosen here where it is not, so that it can be told. */
function settings() {
  const fields = { stream: true, stream_options: { include_usage: true } };
  fields.return_token_ids = fields.return_draft_positions = true;
  const numbers = { temperature: "temperature", max_tokens: "most", seed: "seed" };
  for (const [name, id] of Object.entries(numbers)) if ($(id).value) fields[name] = Number($(id).value);
  fields.seed ??= randomSeed();
  return fields;
}

function history() {
  const messages = [];
  if ($("system").value.trim()) messages.push({ role: "system", content: $("system").value });
  for (const turn of turns) {
    if (turn.answer === null) continue;
    messages.push({ role: "user", content: content(turn) }, { role: "assistant", content: turn.answer });
  }
  return messages;
}

function content({ text, images }) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

// What is shown

function show(answer, all) {
  const rate = answer.rate;
  $("rate").textContent = rate ? rate.toFixed(1) : "–";
  $("length").textContent = answer.steps.length ? answer.perStep.toFixed(2) : "–";
  const tokens = answer.pieces.length;
  $("share").textContent = tokens ? `${Math.round((100 * answer.accepted) / tokens)}%` : "–";
  drawSteps($("steps"), answer);
  drawSpeed($("speed"), all);
}

/** Work for the next frame at the earliest, however often it is asked for. */
function every(work) {
  let due = 0;
  const now = () => {
    cancelAnimationFrame(due);
    due = 0;
    work();
  };
  return { now, soon: () => (due ||= requestAnimationFrame(now)) };
}

function question(turn) {
  const said = make("div", "said");
  if (turn.images.length) said.append(make("div", "images", ...turn.images.map(picture)));
  said.append(make("div", "words", turn.text));
  return said;
}

function picture({ name, url }) {
  const made = make("img");
  made.src = url;
  made.alt = name;
  return made;
}

let sticks = true; // the end stays in sight as the answer grows, until somebody goes back
let height = 0; // where it was scrolled to

function scroller() {
  return narrow.matches ? document.documentElement : $("log");
}

function watch() {
  const { scrollTop, scrollHeight, clientHeight } = scroller();
  if (scrollTop < height) sticks = false;
  if (scrollHeight - scrollTop - clientHeight < 40) sticks = true;
  height = scrollTop;
}

function scroll(always = false) {
  sticks ||= always;
  if (sticks) scroller().scrollTop = scroller().scrollHeight;
}

function settle() {
  const busy = running !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("send").disabled = server === null;
  $("compare").disabled = busy || $("speculation").disabled || server === null;
  $("clear").disabled = busy;
}

function clear() {
  for (const turn of turns) turn.element.remove();
  turns = [];
  $("empty").hidden = false;
  $("ask").focus();
}

// Images

function take(pictures, text) {
  images = pictures;
  $("ask").value = text;
  $("images").hidden = !images.length;
  $("images").replaceChildren(...images.map((image) => removable(image)));
}

function removable(image) {
  const button = make("button", "", picture(image));
  button.type = "button";
  button.title = `Remove ${image.name}`;
  button.onclick = () => take(images.filter((other) => other !== image), $("ask").value);
  return button;
}

async function pick() {
  const files = [...$("file").files];
  $("file").value = "";
  const read = await Promise.all(files.map(dataUrl));
  take([...images, ...read], $("ask").value);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// Wiring

$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("ask").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
};
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("stop").onclick = () => running?.abort();
$("compare").onclick = compare;
$("clear").onclick = clear;
$("another").onclick = () => ($("seed").value = randomSeed());
$("file").onchange = pick;
for (const sample of document.querySelectorAll(".samples button")) {
  sample.onclick = () => {
    $("ask").value = sample.textContent;
    $("ask").focus();
  };
}
$("settings").addEventListener("invalid", () => ($("settings").open = true), true); // what is hidden cannot be mended
$("door").oncancel = (event) => event.preventDefault();
$("log").onscroll = document.onscroll = watch;
$("settings").open = !narrow.matches;
drawSteps($("steps"), { steps: [] });
drawSpeed($("speed"), []);
settle();
connect();
