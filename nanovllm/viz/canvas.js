// Paints the scenes that the kernel sends (nanovllm/viz/scene.py), and passes clicks back as messages.
//
// A frame is a whole picture: u32 header length, JSON header, then float32, int32 and uint8 arrays. So a late view, a
// second view or a dropped frame does no harm. Everything here works on the newest frame; nothing is remembered.

const NO_COLOR = 255;
const FONT = "Verdana, 'DejaVu Sans', system-ui, sans-serif"; // as wide as matplotlib's, so that the pictures agree
const FLASH_MS = 900;

/** The scene in a frame, its arrays as views into the message. */
function unpack(view) {
  if (!view || view.byteLength < 4) return null;
  const buffer = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength); // 4-byte aligned
  const size = new DataView(buffer).getUint32(0, true);
  const scene = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let numFloats = 0;
  let numInts = 0;
  for (const head of scene.items) {
    if (head[0] === "r") {
      numFloats += 4 * head[1];
      numInts += head[6] ? head[1] : 0;
    } else {
      numFloats += 2 * (head[0] === "t" ? head[1].length : head[1]);
    }
  }
  const floats = new Float32Array(buffer, 4 + size, numFloats);
  const ints = new Int32Array(buffer, 4 + size + 4 * numFloats, numInts);
  const bytes = new Uint8Array(buffer, 4 + size + 4 * (numFloats + numInts));
  let f = 0;
  let i = 0;
  let b = 0;
  scene.items = scene.items.map((head) => {
    const kind = head[0];
    const n = kind === "t" ? head[1].length : head[1];
    const item = { kind, n, at: floats.subarray(f, f + (kind === "r" ? 4 : 2) * n) };
    f += item.at.length;
    if (kind === "r") {
      [, , item.stroke, item.lineWidth, item.hatch, item.flash] = head;
      if (head[6]) {
        item.tags = ints.subarray(i, i + n);
        i += n;
      }
    } else if (kind === "t") {
      [, item.strings, item.size, item.align, item.bold] = head;
    } else {
      [, , item.color, item.lineWidth, item.dashed] = head;
    }
    if (kind !== "l") {
      item.colors = bytes.subarray(b, b + n);
      b += n;
    }
    return item;
  });
  scene.tips = new Map(scene.tips);
  return scene;
}

/** Whether the page behind an element is dark: the first opaque background upwards decides. */
function isDark(element) {
  for (let node = element; node; node = node.parentElement) {
    const match = getComputedStyle(node).backgroundColor.match(/[\d.]+/g);
    if (match && (match.length < 4 || Number(match[3]) > 0.5)) {
      return 0.299 * match[0] + 0.587 * match[1] + 0.114 * match[2] < 128;
    }
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Diagonal lines, as a fill. */
function hatchPattern(context, color, scale) {
  const tile = document.createElement("canvas");
  const size = Math.max(4, Math.round(5 * scale));
  tile.width = tile.height = size;
  const g = tile.getContext("2d");
  g.strokeStyle = color;
  g.lineWidth = Math.max(1, scale * 0.8);
  g.beginPath();
  for (const shift of [-size, 0, size]) {
    g.moveTo(shift, size);
    g.lineTo(shift + size, 0);
  }
  g.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale)); // the context is scaled already
  return pattern;
}

class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  /** Paint a scene. `age`: milliseconds since it came; `tag`: the sequence to outline, or null. */
  paint(scene, palette, age, tag) {
    const canvas = this.canvas;
    const width = canvas.clientWidth || scene.w;
    const scale = (width / scene.w) * (window.devicePixelRatio || 1);
    const [w, h] = [Math.round(scene.w * scale), Math.round(scene.h * scale)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.aspectRatio = `${scene.w} / ${scene.h}`;
    }
    this.colors = palette.map((pair) => pair[isDark(canvas.parentElement) ? 1 : 0]);
    this.scale = scale;
    this.hatches = new Map();
    const g = this.context;
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, w, h);
    g.setTransform(scale, 0, 0, scale, 0, 0);
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const pulse = calm || age > FLASH_MS ? 1 : 0.35 + 0.65 * Math.abs(Math.cos((age / FLASH_MS) * 2 * Math.PI));
    for (const item of scene.items) {
      if (item.kind === "r") this.rects(item, pulse);
      else if (item.kind === "t") this.texts(item);
      else this.line(item);
    }
    if (tag !== null) this.outline(scene, tag);
    return !calm && age <= FLASH_MS && scene.items.some((item) => item.flash);
  }

  rects(item, pulse) {
    const g = this.context;
    const { at, n } = item;
    g.globalAlpha = item.flash ? pulse : 1;
    let fill = -1;
    for (let k = 0; k < n; k += 1) {
      if (item.colors[k] !== NO_COLOR) {
        if (item.colors[k] !== fill) {
          fill = item.colors[k];
          g.fillStyle = this.colors[fill];
        }
        g.fillRect(at[4 * k], at[4 * k + 1], at[4 * k + 2], at[4 * k + 3]);
      }
    }
    if (item.hatch !== NO_COLOR) {
      g.fillStyle = this.hatch(this.colors[item.hatch]);
      for (let k = 0; k < n; k += 1) g.fillRect(at[4 * k], at[4 * k + 1], at[4 * k + 2], at[4 * k + 3]);
    }
    if (item.stroke !== NO_COLOR) {
      g.strokeStyle = this.colors[item.stroke];
      g.lineWidth = item.lineWidth;
      g.setLineDash([]);
      for (let k = 0; k < n; k += 1) g.strokeRect(at[4 * k], at[4 * k + 1], at[4 * k + 2], at[4 * k + 3]);
    }
    g.globalAlpha = 1;
  }

  hatch(color) {
    if (!this.hatches.has(color)) this.hatches.set(color, hatchPattern(this.context, color, this.scale));
    return this.hatches.get(color);
  }

  texts(item) {
    const g = this.context;
    g.font = `${item.bold ? "bold " : ""}${item.size}px ${FONT}`;
    g.textAlign = { l: "left", c: "center", r: "right" }[item.align];
    g.textBaseline = "alphabetic";
    for (let k = 0; k < item.n; k += 1) {
      g.fillStyle = this.colors[item.colors[k]];
      g.fillText(item.strings[k], item.at[2 * k], item.at[2 * k + 1] + 0.36 * item.size);
    }
  }

  line(item) {
    const g = this.context;
    g.strokeStyle = this.colors[item.color];
    g.lineWidth = item.lineWidth;
    g.setLineDash(item.dashed ? [4 * item.lineWidth, 3 * item.lineWidth] : []);
    g.beginPath();
    let isDown = false;
    for (let k = 0; k < item.n; k += 1) {
      const [x, y] = [item.at[2 * k], item.at[2 * k + 1]];
      if (Number.isNaN(x)) isDown = false;
      else if (isDown) g.lineTo(x, y);
      else {
        g.moveTo(x, y);
        isDown = true;
      }
    }
    g.stroke();
    g.setLineDash([]);
  }

  /** A frame around everything that belongs to one sequence, in every panel. */
  outline(scene, tag) {
    const g = this.context;
    g.strokeStyle = this.colors[0];
    g.lineWidth = 1.5;
    for (const { tags, at, n } of scene.items) {
      if (!tags) continue;
      for (let k = 0; k < n; k += 1) {
        if (tags[k] === tag) g.strokeRect(at[4 * k] - 1, at[4 * k + 1] - 1, at[4 * k + 2] + 2, at[4 * k + 3] + 2);
      }
    }
  }
}

/** The sequence under a point of the scene (the topmost one), or null. */
function tagAt(scene, x, y) {
  for (let j = scene.items.length - 1; j >= 0; j -= 1) {
    const { tags, at, n } = scene.items[j];
    if (!tags) continue;
    for (let k = n - 1; k >= 0; k -= 1) {
      const inside = x >= at[4 * k] && x < at[4 * k] + at[4 * k + 2] && y >= at[4 * k + 1] && y < at[4 * k + 1] + at[4 * k + 3];
      if (inside && tags[k] >= 0) return tags[k];
    }
  }
  return null;
}

function make(name, className, attributes = {}, text = "") {
  const element = document.createElement(name);
  element.className = className;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

/** The Player's buttons. They only send messages; how they look follows the frame's "player" entry. */
function makeControls(model, bar) {
  const say = (content) => model.send(content);
  const button = (label, hint, content) => {
    const element = make("button", "nv-button", { type: "button", title: hint, "aria-label": hint }, label);
    element.addEventListener("click", () => say(typeof content === "function" ? content() : content));
    bar.appendChild(element);
    return element;
  };
  const select = (hint, choices, onChange) => {
    const element = make("select", "nv-select", { title: hint, "aria-label": hint });
    for (const [value, label] of choices) element.appendChild(make("option", "", { value }, label));
    element.addEventListener("change", () => onChange(element.value));
    bar.appendChild(element);
    return element;
  };
  const back = button("◀ Step", "One step back", { do: "back" });
  const play = button("Pause", "Pause", () => ({ do: play.dataset.state === "playing" ? "pause" : "play" }));
  play.classList.add("nv-main");
  const step = button("Step ▶", "One step on", { do: "step" });
  const until = select("Run until the next event of this kind", [
    ["any", "any event"], ["preempt", "preemption"], ["evict", "eviction"], ["hit", "prefix hit"], ["finish", "end"],
  ], () => {});
  const run = button("Run to next", "Run until the next event of the kind chosen on the left", () => ({ do: "until", event: until.value }));
  const speed = select("Speed", [["1", "1 step/s"], ["2", "2 steps/s"], ["4", "4 steps/s"], ["16", "16 steps/s"], ["0", "full speed"]],
    (value) => say({ do: "speed", value: Number(value) }));
  const slider = make("input", "nv-slider", { type: "range", "aria-label": "Step that is shown", title: "Step that is shown" });
  slider.addEventListener("input", () => say({ do: "seek", step: Number(slider.value) }));
  bar.appendChild(slider);
  const status = make("span", "nv-status", { role: "status" });
  bar.appendChild(status);
  const keep = button("Keep as picture", "Replace the controls by a still picture, which stays in the saved notebook", { do: "close" });
  return (state) => {
    const isEnd = state.over && state.step >= state.last;
    play.dataset.state = state.playing ? "playing" : "paused";
    const [label, name, hint] = state.playing ? ["❚❚ Pause", "Pause", "Pause at the end of the step"]
      : isEnd ? ["↻ Replay", "Play again", "Play again, from the first step"] : ["► Play", "Play", "Play"];
    if (play.textContent !== label) {
      play.textContent = label;
      play.setAttribute("aria-label", name);
      play.title = hint;
    }
    play.disabled = isEnd && state.last <= state.first;
    step.disabled = run.disabled = isEnd || state.playing;
    back.disabled = state.playing || state.step <= state.first;
    slider.disabled = state.last <= state.first; // to drag it pauses
    [slider.min, slider.max, slider.value] = [state.first, state.last, state.step];
    if (document.activeElement !== speed) speed.value = String(state.speed);
    keep.hidden = !state.over;
    if (!state.playing || status.textContent === "") status.textContent = state.status;
    else status.textContent = `step ${state.step}`;
  };
}

function render({ model, el }) {
  // Without the attribute, Lab's own shortcuts would take Enter and the arrow keys away from the controls.
  const root = make("div", "nv-root", { "data-lm-suppress-shortcuts": "true" });
  const canvas = make("canvas", "nv-canvas", { role: "img", tabindex: "0" });
  const tip = make("div", "nv-tip", { role: "status", "aria-live": "polite" });
  tip.hidden = true;
  let updateControls = null;
  if (model.get("has_controls")) {
    const bar = make("div", "nv-bar", { role: "toolbar", "aria-label": "Player" });
    updateControls = makeControls(model, bar);
    root.appendChild(bar);
  }
  root.append(canvas, tip);
  el.appendChild(root);

  const painter = new Painter(canvas);
  let scene = null;
  let since = 0;
  let tag = null;
  let request = 0;
  let isOpen = true;

  const draw = () => {
    request = 0;
    if (!isOpen || !scene) return;
    const isMoving = painter.paint(scene, model.get("palette"), performance.now() - since, tag);
    if (isMoving) schedule();
  };
  const schedule = () => {
    if (!request && isOpen) request = requestAnimationFrame(draw);
  };
  const onFrame = () => {
    const next = unpack(model.get("frame"));
    if (!next) return;
    scene = next;
    since = performance.now();
    canvas.setAttribute("aria-label", scene.label);
    if (updateControls && scene.player) updateControls(scene.player);
    root.dataset.step = scene.step ?? "";
    if (tag !== null) showTip();
    schedule();
  };
  const showTip = (x = null, y = null) => {
    const text = tag === null ? null : scene.tips.get(tag) ?? `sequence ${tag}`;
    tip.hidden = text === null;
    tip.textContent = text ?? "";
    if (x !== null) {
      tip.style.left = `${Math.min(x + 12, Math.max(0, root.clientWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${y + 16}px`;
    }
  };
  const choose = (next, x, y) => {
    const changed = next !== tag;
    tag = next;
    showTip(x, y);
    if (changed) schedule();
  };
  canvas.addEventListener("pointermove", (event) => {
    if (!scene) return;
    const zoom = scene.w / canvas.clientWidth;
    choose(tagAt(scene, event.offsetX * zoom, event.offsetY * zoom), event.offsetX, canvas.offsetTop + event.offsetY);
  });
  canvas.addEventListener("pointerleave", () => choose(null));
  canvas.addEventListener("blur", () => choose(null));
  canvas.addEventListener("keydown", (event) => {
    const keys = scene ? [...scene.tips.keys()] : [];
    const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") choose(null);
    if (!move || !keys.length) return;
    event.preventDefault();
    const place = tag === null ? (move > 0 ? 0 : keys.length - 1) : (keys.indexOf(tag) + move + keys.length) % keys.length;
    choose(keys[place], 8, canvas.offsetTop + 8);
  });

  const resizes = new ResizeObserver(schedule);
  resizes.observe(canvas);
  const themes = new MutationObserver(schedule); // Lab says on <body> which theme it wears
  themes.observe(document.body, { attributes: true, attributeFilter: ["class", "style", "data-jp-theme-light", "data-jp-theme-name"] });
  model.on("change:frame", onFrame);
  onFrame();
  return () => {
    isOpen = false;
    cancelAnimationFrame(request);
    resizes.disconnect();
    themes.disconnect();
    model.off("change:frame", onFrame);
  };
}

export default { render };
