"use strict";
const items = Array.from(document.querySelectorAll('[role="treeitem"]'));
const index = new Map(items.map((item, number) => [item, number]));
const parents = [];
const trail = [];
items.forEach((item, number) => {
  const level = Number(item.getAttribute("aria-level"));
  trail.length = level - 1;
  parents.push(level > 1 ? trail[level - 2] : -1);
  trail.push(number);
});
const hasChildren = items.map((item) => item.hasAttribute("aria-expanded"));
let open = items.map((item) => !item.hasAttribute("data-folded"));
let openBefore = null; // what was open before a search
let found = null; // what a search shows: matches, and what is above them
let matches = [];
let current = 0;
const search = document.getElementById("search");
const count = document.getElementById("count");
const details = document.getElementById("details");
const texts = items.map((item) => item.textContent.toLowerCase());

function refresh() {
  const shown = [];
  items.forEach((item, number) => {
    const above = parents[number];
    shown.push((above < 0 || (shown[above] && open[above])) && (found === null || found.has(number)));
    item.hidden = !shown[number];
    if (hasChildren[number]) item.setAttribute("aria-expanded", String(open[number]));
  });
  while (items[current].hidden && parents[current] >= 0) setCurrent(parents[current]);
}

function setCurrent(number) {
  items[current].tabIndex = -1;
  current = number;
  items[current].tabIndex = 0;
}

function focusOn(number) {
  if (number < 0 || number >= items.length) return;
  setCurrent(number);
  items[number].focus();
  items[number].scrollIntoView({ block: "nearest" });
}

function step(direction) {
  let number = current + direction;
  while (number >= 0 && number < items.length && items[number].hidden) number += direction;
  focusOn(number);
}

function setOpen(number, isOpen) {
  if (!hasChildren[number]) return;
  open[number] = isOpen;
  refresh();
}

function find() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const number of matches) items[number].classList.remove("match");
  if (words.length === 0) {
    if (found !== null) open = openBefore;
    found = null;
    matches = [];
    count.textContent = "";
    refresh();
    return;
  }
  if (found === null) openBefore = open.slice();
  open = openBefore.slice();
  found = new Set();
  matches = [];
  texts.forEach((text, number) => {
    if (!words.every((word) => text.includes(word))) return;
    matches.push(number);
    items[number].classList.add("match");
    found.add(number);
    for (let above = parents[number]; above >= 0; above = parents[above]) {
      found.add(above);
      open[above] = true;
    }
  });
  count.textContent = matches.length === 1 ? "1 match" : `${matches.length} matches`;
  refresh();
}

function show(item) {
  const heading = document.createElement("h2");
  heading.textContent = item.querySelector(".title").textContent;
  const facts = item.querySelector("dl").cloneNode(true);
  facts.removeAttribute("id");
  facts.hidden = false;
  details.replaceChildren(heading, facts);
  const group = item.dataset.group;
  for (const other of items) {
    other.classList.toggle("peer", group !== undefined && other.dataset.group === group);
  }
}

function itemOf(event) {
  return event.target.closest('[role="treeitem"]');
}

const tree = document.getElementById("tree");
tree.addEventListener("focusin", (event) => show(itemOf(event)));
tree.addEventListener("pointerover", (event) => {
  const item = itemOf(event);
  if (item) show(item);
});
tree.addEventListener("click", (event) => {
  const item = itemOf(event);
  if (!item) return;
  const number = index.get(item);
  focusOn(number);
  if (event.target.closest(".toggle")) setOpen(number, !open[number]);
});
tree.addEventListener("dblclick", (event) => {
  const item = itemOf(event);
  if (item && !event.target.closest(".toggle")) setOpen(index.get(item), !open[index.get(item)]);
});

const keys = {
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  ArrowRight: () => {
    if (!hasChildren[current]) return;
    if (open[current]) {
      if (!items[current + 1].hidden) step(1);
    } else setOpen(current, true);
  },
  ArrowLeft: () => {
    if (hasChildren[current] && open[current]) setOpen(current, false);
    else focusOn(parents[current]);
  },
  Home: () => focusOn(items.findIndex((item) => !item.hidden)),
  End: () => focusOn(items.findLastIndex((item) => !item.hidden)),
  Enter: () => setOpen(current, !open[current]),
  " ": () => setOpen(current, !open[current]),
  "*": () => {
    items.forEach((_item, number) => {
      if (parents[number] === parents[current]) open[number] = true;
    });
    refresh();
  },
  "/": () => search.focus(),
};
tree.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});

search.addEventListener("input", find);
search.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    search.value = "";
    find();
  } else if (event.key === "ArrowDown" && matches.length > 0) {
    event.preventDefault();
    focusOn(matches[0]);
  }
});
document.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (matches.length === 0) return;
  const next = matches.find((number) => number > current);
  focusOn(next === undefined ? matches[0] : next);
});

function setAll(isOpen) {
  open = items.map((_item, number) => isOpen || parents[number] < 0);
  if (openBefore !== null) openBefore = open.slice();
  refresh();
}
document.getElementById("expand").addEventListener("click", () => setAll(true));
document.getElementById("collapse").addEventListener("click", () => setAll(false));
refresh();
