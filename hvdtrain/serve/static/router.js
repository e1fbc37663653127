// Which view is shown: #/jobs/NAME and the like. A view fills an element, and returns what ends it.
import { complain } from "./notices.js";

let leave = () => {};
let shown = null;
let visits = 0;

export function start(routes, main) {
  async function go() {
    // Other fragments are places on the page.
    if (location.hash && !location.hash.startsWith("#/")) return;
    const { path, query } = where();
    const address = location.hash || "#/";
    if (address === shown) return;
    const first = shown === null;
    shown = address;
    visits += 1;
    const visit = visits;
    leave();
    leave = () => {};
    main.replaceChildren();
    scrollTo(0, 0);
    const [view, parts] = find(routes, path);
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${path}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    try {
      const done = await view(main, { parts, query });
      // Meanwhile somebody may have gone elsewhere.
      if (visit === visits) leave = done ?? leave;
      else done?.();
    } catch (error) {
      complain(error);
    }
    const heading = main.querySelector("h1");
    if (heading) {
      document.title = `${heading.dataset.title ?? heading.textContent} · hvdtrain`;
      heading.tabIndex = -1;
      if (!first) heading.focus({ preventScroll: true });
    }
  }
  addEventListener("hashchange", go);
  go();
}

export function where() {
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  return { path, query: new URLSearchParams(query) };
}

// Keeps what a view shows in the address, without leaving the view.
export function setQuery(values) {
  const words = new URLSearchParams(values);
  for (const [name, value] of [...words]) if (!value) words.delete(name);
  const { path } = where();
  const hash = words.size ? `#${path}?${words}` : `#${path}`;
  if (hash === location.hash) return;
  history.replaceState(null, "", hash);
  shown = hash;
}

export const jobLink = (name) => `#/jobs/${encodeURIComponent(name)}`;

export const compareLink = (names) => `#/compare?jobs=${names.map(encodeURIComponent).join(",")}`;

function find(routes, path) {
  for (const [pattern, view] of routes) {
    const found = pattern.exec(path);
    if (found) return [view, found.slice(1).map(decodeURIComponent)];
  }
  return [routes[0][1], []];
}
