// Two pictures of a running answer, drawn by hand: colours come from the page's style.

const HEIGHT = 92, LEFT = 28, RIGHT = 8, TOP = 10, BOTTOM = 16; // pixels
const BAR = 5; // pixels from one step to the next
const WINDOW = 1000; // milliseconds over which tokens/s are taken
const SHORTEST = 200; // milliseconds below which they would be noise

/** Bars: how many tokens each of the last steps brought, accepted ones above the target's own. */
export function drawSteps(svg, answer) {
  const right = fitted(svg) - RIGHT;
  const steps = answer.steps.slice(-Math.floor((right - LEFT) / BAR));
  const first = answer.steps.length - steps.length;
  const most = Math.max(2, ...steps.map((step) => step.tokens));
  const scale = scaled(most);
  const parts = [...grid(steps.length ? [0, most] : [0], scale, right), ...under(LEFT, steps.length ? `step ${first + 1}` : "", "start")];
  steps.forEach((step, n) => {
    const x = LEFT + n * BAR;
    const own = step.tokens - step.accepted;
    parts.push(bar("own", x, scale(own), BAR - 1, scale(0) - scale(own)));
    if (step.accepted) parts.push(bar("accepted", x, scale(step.tokens), BAR - 1, scale(own) - scale(step.tokens)));
  });
  let said = "nothing yet";
  if (steps.length) {
    parts.push(line("mean", LEFT, right, scale(answer.perStep)));
    said = `${count(answer.steps.length, "step")}, ${answer.perStep.toFixed(2)} tokens each`;
  }
  svg.replaceChildren(...parts);
  svg.setAttribute("aria-label", `Tokens of each step: ${said}`);
}

/** Lines: tokens/s of each answer over the seconds since its first token. */
export function drawSpeed(svg, answers) {
  const right = fitted(svg) - RIGHT;
  const curves = answers.map((answer) => ({ answer, points: rates(answer) })).filter(({ points }) => points.length);
  const most = round(Math.max(1, ...curves.flatMap(({ points }) => points.map(([, rate]) => rate))));
  const last = Math.max(1, ...curves.flatMap(({ points }) => points.map(([time]) => time)));
  const scale = scaled(most);
  const across = (time) => LEFT + ((right - LEFT) * time) / last;
  const parts = grid(curves.length ? [0, most] : [0], scale, right);
  for (const { answer, points } of curves) {
    const places = points.map(([time, rate]) => `${across(time).toFixed(1)},${scale(rate).toFixed(1)}`);
    parts.push(element("polyline", { class: answer.speculates ? "with" : "without", points: places.join(" ") }));
  }
  if (curves.length) parts.push(...under(right, `${last.toFixed(1)} s`, "end"));
  svg.replaceChildren(...parts);
  const said = answers.filter((answer) => answer.rate).map((answer) => `${answer.rate.toFixed(1)} ${answer.title}`);
  svg.setAttribute("aria-label", `Tokens per second: ${said.join(", ") || "nothing yet"}`);
}

/** [seconds, tokens/s] after each step, over the last WINDOW of it. */
function rates(answer) {
  const { times, counts } = answer;
  const points = [];
  for (let from = 0, at = 1; at < times.length; at++) {
    while (times[at] - times[from + 1] >= WINDOW) from++;
    const span = times[at] - times[from];
    if (span >= SHORTEST) points.push([(times[at] - times[0]) / 1000, (1000 * (counts[at] - counts[from])) / span]);
  }
  return points;
}

function round(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value);
}

const scaled = (most) => (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * value) / most;

/** The width of a picture in pixels, which it is drawn in: letters keep their size. */
function fitted(svg) {
  const width = svg.clientWidth || 320;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  return width;
}

function grid(marks, scale, right) {
  return marks.flatMap((mark) => [
    line("grid", LEFT, right, scale(mark)),
    text(LEFT - 4, scale(mark) + 3.5, `${mark}`, "end"),
  ]);
}

const under = (x, words, anchor) => (words ? [text(x, HEIGHT - 4, words, anchor)] : []);

const bar = (kind, x, y, width, height) => element("rect", { class: kind, x, y, width, height });

const line = (kind, x1, x2, y) => element("line", { class: kind, x1, x2, y1: y, y2: y });

function text(x, y, words, anchor) {
  const made = element("text", { x, y, "text-anchor": anchor });
  made.textContent = words;
  return made;
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
