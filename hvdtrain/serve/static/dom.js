// Creates elements. Text is never interpreted as HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Returns the colour that a custom property has in the current theme, for use in a canvas.
export function colour(name) {
  const probe = h("i", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Sets a text only if it differs, so that the user's selection is kept.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setVisible(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

// Highlights all occurrences of a text. Upper and lower case are different.
export function marked(text, wanted) {
  if (!wanted) return [text];
  const parts = text.split(wanted);
  return parts.flatMap((part, number) => (number ? [h("mark", {}, wanted), part] : [part]));
}

let number = 0;
export function newId(word) {
  number += 1;
  return `${word}-${number}`;
}

// A labelled field. Screen readers read ``hint`` together with the label.
export function field(label, control, hint = "") {
  control.id ||= newId("field");
  const parts = [h("label", { for: control.id }, label), control];
  if (hint) {
    const id = newId("hint");
    control.setAttribute("aria-describedby", id);
    parts.push(h("p", { class: "hint", id }, hint));
  }
  return h("div", { class: "field" }, parts);
}

export function debounced(act, wait_ms) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), wait_ms);
  };
}
