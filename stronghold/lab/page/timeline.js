"use strict";
(() => {
  const source = document.getElementById("spans");
  if (!source) return;
  const rows = JSON.parse(source.textContent); // [{lane, colour, spans: [[name, begin, length], …]}, …] in ms
  const box = document.getElementById("timeline");
  const canvas = box.querySelector("canvas");
  const tip = box.querySelector(".tip");
  const shown = box.querySelector("output");
  const pen = canvas.getContext("2d");

  const AXIS = 26, ROW = 24, THIN_ROW = 11, GAP = 5, FONT = "12px system-ui, sans-serif";
  const whole = Math.max(...rows.map((row) => Math.max(...row.spans.map((s) => s[1] + s[2])))) || 1;
  const shortest = Math.max(1e-4, whole / 1e6); // a range to zoom into: times are known to some 0.1 µs
  let begin = 0, end = whole; // the range shown
  let gutter = 0, width = 0, height = 0, queued = false;

  // Rows of one lane lie close together, and thin, under one name.
  let y = AXIS;
  rows.forEach((row, number) => {
    const first = number === 0 || rows[number - 1].lane !== row.lane;
    const alone = first && (number + 1 === rows.length || rows[number + 1].lane !== row.lane);
    y += first ? GAP : 1;
    Object.assign(row, { first, top: y, height: alone ? ROW : THIN_ROW, ink: inkOn(row.colour) });
    y += row.height;
  });
  height = y + GAP;

  function inkOn(colour) {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
  }

  function place(time) { return gutter + ((time - begin) / (end - begin)) * (width - gutter); }
  function timeAt(x) { return begin + ((x - gutter) / (width - gutter)) * (end - begin); }
  function inMs(value, digits) {
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + " ms";
  }
  function digitsFor(step) { return Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))); }

  function show(from, to) {
    const range = Math.min(whole, Math.max(shortest, to - from));
    begin = Math.min(Math.max(0, from), whole - range);
    end = begin + range;
    if (!queued) {
      queued = true;
      requestAnimationFrame(draw);
    }
  }
  function zoom(factor, from = (gutter + width) / 2, to = from) { // what is at one place comes to the other
    const range = Math.min(whole, Math.max(shortest, (end - begin) * factor));
    const first = timeAt(Math.max(gutter, from)) - (range * (Math.max(gutter, to) - gutter)) / (width - gutter);
    show(first, first + range);
  }
  function move(by) { show(begin + by, end + by); }

  function resize() {
    const scale = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = FONT;
    gutter = 12 + Math.max(...rows.map((row) => pen.measureText(row.lane).width));
    gutter = Math.round(Math.min(gutter, width / 3)); // edges on whole pixels are sharp
    show(begin, end);
  }

  function tickStep() {
    const rough = ((end - begin) / (width - gutter)) * 80;
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  }

  function firstAt(spans, time) { // the first span that ends after time; those of a row follow one another
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle][1] + spans[middle][2] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function draw() {
    queued = false;
    const style = getComputedStyle(document.documentElement);
    const [front, faint, line, soft] =
      ["--front", "--faint", "--line", "--soft"].map((name) => style.getPropertyValue(name));
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    pen.fillStyle = soft;
    for (const row of rows) pen.fillRect(gutter, row.top, width - gutter, row.height);
    const step = tickStep();
    const digits = digitsFor(step);
    for (let time = Math.ceil(begin / step) * step; time <= end; time += step) {
      const x = Math.round(place(time)), text = inMs(time, digits), half = pen.measureText(text).width / 2;
      pen.fillStyle = line;
      pen.fillRect(x, AXIS - 4, 1, height - AXIS + 4);
      pen.fillStyle = faint;
      pen.fillText(text, Math.min(Math.max(x - half, gutter), width - 2 * half - 2), AXIS / 2);
    }
    for (const row of rows) {
      if (row.first) {
        pen.fillStyle = front;
        pen.fillText(row.lane, 6, row.top + row.height / 2, gutter - 10);
      }
      drawRow(row);
    }
    const fine = digitsFor((end - begin) / 1000);
    shown.textContent = `${inMs(begin, fine)} to ${inMs(end, fine)}`;
    Object.assign(box.dataset, { begin, end, whole, gutter });
  }

  function drawRow(row) {
    pen.save();
    pen.beginPath();
    pen.rect(gutter, row.top, width - gutter, row.height);
    pen.clip();
    let drawn = -1; // what ends in a pixel that is filled already would not be seen
    for (let n = firstAt(row.spans, begin); n < row.spans.length && row.spans[n][1] <= end; n++) {
      const [name, from, length] = row.spans[n];
      const left = Math.min(Math.round(place(from)), width - 1);
      const right = Math.max(left + 1, Math.round(place(from + length)));
      if (right <= drawn) continue;
      pen.fillStyle = row.colour;
      pen.fillRect(left, row.top, right - left - (right - left > 4 ? 1 : 0), row.height); // 1: a line between neighbours
      drawn = right;
      const seen = Math.max(left, gutter), room = Math.min(right, width) - seen - 8;
      if (row.height < ROW || room < 12) continue;
      const words = name.split(" ");
      // A root parameter's number is no layer's.
      const short = words.slice(words.at(-2) === "root" ? -2 : -1).join(" ");
      const text = [name, short].find((label) => pen.measureText(label).width <= room);
      if (!text) continue;
      pen.fillStyle = row.ink;
      pen.fillText(text, seen + 4, row.top + row.height / 2);
    }
    pen.restore();
  }

  function spanAt(x, y, reach) {
    const row = rows.find((r) => y >= r.top - 1 && y <= r.top + r.height);
    if (!row || x < gutter) return null;
    let best = null, nearest = reach; // in pixels: short parts are narrower than a finger, or even a mouse, can hit
    for (let n = firstAt(row.spans, timeAt(x - reach)); n < row.spans.length; n++) {
      const [, from, length] = row.spans[n];
      if (place(from) > x + reach) break;
      const away = Math.max(0, place(from) - x, x - place(from + length));
      if (away < nearest || (away === 0 && nearest > 0)) [best, nearest] = [row.spans[n], away];
    }
    return best && { row, span: best };
  }

  function point(x, y, reach) {
    const found = spanAt(x, y, reach);
    tip.hidden = !found;
    if (!found) return;
    const { row, span: [name, from, length] } = found;
    const bold = document.createElement("b");
    bold.textContent = name;
    const lines = [row.lane, `begins at ${inMs(from, 3)}`, `takes ${inMs(length, 3)}`];
    tip.replaceChildren(bold, ...lines.flatMap((text, n) => (n ? [document.createElement("br"), text] : [text])));
    const top = row.top + row.height + 8;
    tip.style.left = Math.max(0, Math.min(x - tip.offsetWidth / 2, width - tip.offsetWidth)) + "px";
    tip.style.top = (top + tip.offsetHeight > height && row.top > tip.offsetHeight + 8
      ? row.top - tip.offsetHeight - 8 : top) + "px";
  }
  function hideTip() { tip.hidden = true; }

  // One pointer moves, two zoom; one that stayed in its place was a tap.
  const pointers = new Map();
  let travelled = 0;
  function at(event) { // within the canvas, inside of its border
    const frame = canvas.getBoundingClientRect();
    return { x: event.clientX - frame.left - canvas.clientLeft, y: event.clientY - frame.top - canvas.clientTop };
  }
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, at(event));
    travelled = pointers.size === 1 ? 0 : Infinity;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = at(event), before = pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType === "mouse") point(now.x, now.y, 3);
      return;
    }
    const perPixel = (end - begin) / (width - gutter);
    travelled += Math.hypot(now.x - before.x, now.y - before.y);
    if (pointers.size === 1) {
      move((before.x - now.x) * perPixel);
      if (travelled > 6) hideTip();
    } else if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const spread = (p) => Math.max(10, Math.abs(p.x - other.x)); // time goes across
      zoom(spread(before) / spread(now), (before.x + other.x) / 2, (now.x + other.x) / 2);
      hideTip();
    }
    pointers.set(event.pointerId, now);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (pointers.delete(event.pointerId) && travelled <= 6) {
      const { x, y } = at(event);
      point(x, y, event.pointerType === "mouse" ? 3 : 12);
    }
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hideTip(); });
  canvas.addEventListener("dblclick", (event) => zoom(1 / 3, at(event).x));
  canvas.addEventListener("wheel", (event) => {
    const lines = event.deltaMode === 1 ? 33 : 1;
    const across = event.shiftKey ? event.deltaY : event.deltaX;
    const up = event.shiftKey ? 0 : event.deltaY;
    if (Math.abs(across) > Math.abs(up)) {
      move((across * lines * (end - begin)) / (width - gutter));
    } else {
      if (up > 0 && end - begin >= whole) return; // nothing left to zoom out of: the page scrolls
      zoom(Math.exp(Math.max(-0.5, Math.min(0.5, up * lines * 0.002))), at(event).x);
    }
    event.preventDefault();
    hideTip();
  }, { passive: false });

  const actions = {
    in: () => zoom(1 / 2), out: () => zoom(2), whole: () => show(0, whole),
    left: () => move((begin - end) / 5), right: () => move((end - begin) / 5),
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "whole", Home: "whole" };
  box.addEventListener("click", (event) => {
    const action = event.target.dataset && actions[event.target.dataset.do];
    if (action) {
      action();
      hideTip();
    }
  });
  box.addEventListener("keydown", (event) => {
    const name = keys[event.key];
    if (name === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[name]();
    hideTip();
  });
  new ResizeObserver(resize).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(begin, end));
  resize();
})();
