// One answer: what came of it so far, and how that is shown. Whatever a model says becomes text, never markup.

import { count } from "./charts.js";

export class Answer {
  constructor(speculates, seed) {
    this.speculates = speculates;
    this.title = speculates ? "with speculation" : "without speculation";
    this.seed = seed;
    this.text = "";
    this.ids = [];
    this.pieces = []; // the text that became certain with each token
    this.accepted = 0; // draft tokens
    this.steps = []; // {tokens, accepted} of each step behind the prompt
    this.times = []; // milliseconds at which tokens came
    this.counts = []; // tokens that were there then
    this.usage = null;
    this.finish = null;
    this.begin = performance.now();
    this.words = make("div", "words");
    this.facts = make("p", "facts");
    this.element = make("article", "busy", make("h3", "", this.title), this.words, this.facts);
    this.element.setAttribute("aria-busy", "true");
  }

  /** Takes one event of the stream: the tokens of one step. */
  take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const pieces = choice.token_texts ?? [];
    const positions = choice.draft_positions ?? [];
    pieces.forEach((piece, n) => this.#show(piece, positions[n]));
    const content = choice.delta.content ?? "";
    this.#show(content.slice(pieces.join("").length), 0); // what only the end of the answer made certain
    this.text += content;
    this.ids.push(...(choice.token_ids ?? []));
    this.pieces.push(...pieces);
    if (pieces.length) this.#count(pieces.length, positions.filter((position) => position > 0).length);
  }

  /** How it ended: "", or why before its time. */
  end(why = "") {
    this.whole = !why;
    this.element.classList.remove("busy");
    this.element.removeAttribute("aria-busy");
    this.facts.replaceChildren(...this.#facts(why));
  }

  fail(message) {
    this.end("failed");
    this.element.append(make("p", "error", message));
  }

  /** Tokens/s from the first token to the last: reading the prompt does not count. */
  get rate() {
    const last = this.times.length - 1;
    if (last < 1 || this.times[last] === this.times[0]) return 0;
    return (1000 * (this.counts[last] - this.counts[0])) / (this.times[last] - this.times[0]);
  }

  /** Tokens of a step. Steps without a draft count too, so this is no acceptance length where there are any. */
  get perStep() {
    return this.steps.reduce((sum, step) => sum + step.tokens, 0) / this.steps.length;
  }

  #count(tokens, accepted) {
    if (this.counts.length) this.steps.push({ tokens, accepted }); // the first token is the prompt's
    this.accepted += accepted;
    this.times.push(performance.now());
    this.counts.push(this.pieces.length);
  }

  #show(piece, position) {
    if (position > 0) {
      const span = make("span", `draft d${Math.min(position, 4)}`, piece);
      span.title = `draft position ${position}`;
      this.words.append(span);
    } else if (this.words.lastChild instanceof Text) {
      this.words.lastChild.appendData(piece);
    } else if (piece) {
      this.words.append(piece);
    }
  }

  #facts(why) {
    const facts = [];
    if (why) facts.push([why]);
    else if (this.finish === "length") facts.push(["cut off at its limit"]);
    if (this.pieces.length) facts.push(counted(this.pieces.length, "token"));
    if (this.rate) facts.push(["", this.rate.toFixed(1), " tokens/s"]);
    if (this.times.length) facts.push(["first token after ", ((this.times[0] - this.begin) / 1000).toFixed(2), " s"]);
    const seen = this.usage?.speculative;
    if (seen?.steps) {
      facts.push(["acceptance length ", seen.acceptance_length.toFixed(2), ""]);
      facts.push(counted(seen.steps, "verify step"));
      facts.push(["", seen.drafted, " drafted"], ["", seen.accepted, " accepted"]);
    }
    if (this.seed !== undefined) facts.push(["seed ", this.seed, ""]);
    return facts.map(([before, value, after]) => {
      return make("span", "", before, ...(value === undefined ? [] : [make("b", "", `${value}`), after]));
    });
  }
}

const counted = (number, noun) => ["", number, number === 1 ? ` ${noun}` : ` ${noun}s`];

/** What two answers to one request, without and with speculation, come to: a paragraph. */
export function verdict(plain, fast, dtype) {
  const speed = speeds(plain, fast);
  const at = firstDifference(plain.ids, fast.ids);
  if (at < 0) return make("p", "verdict", `The same ${count(plain.ids.length, "token")}${speed}.`);
  const [before, after] = [plain, fast].map(({ pieces }) => (at in pieces ? `“${pieces[at]}”` : "the end"));
  const why =
    dtype === "float32"
      ? "In float32 nothing but a near-tie to the last digit could do that."
      : `In ${dtype} two tokens can be so close that rounding decides between them.`;
  const tells = "eyas run --compare tells such near-ties from faults.";
  const place = `They part at token ${at + 1}: ${before} without speculation, ${after} with it. ${why} ${tells}`;
  return make("p", "verdict parted", `${place} Speed${speed.replace(/^:/, "") || " unknown"}.`);
}

function speeds(plain, fast) {
  if (!plain.rate || !fast.rate) return "";
  const times = (fast.rate / plain.rate).toFixed(2);
  return `: ${fast.rate.toFixed(1)} tokens/s with speculation, ${plain.rate.toFixed(1)} without, ${times}x`;
}

function firstDifference(one, other) {
  const most = Math.max(one.length, other.length);
  for (let n = 0; n < most; n++) if (one[n] !== other[n]) return n;
  return -1;
}

export function make(tag, kind, ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}
