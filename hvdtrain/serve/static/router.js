// Shows the view for the URL's fragment, such as #/jobs/NAME.
//
// A view is a function that loads data and returns the function "fill". Calling "fill" shows the view
// and returns a function that ends it. The previous view stays until the data are loaded.
import { h } from "./dom.js";
import { showError } from "./notices.js";

let leave = () => {};
let shown = null;
let visits = 0;

// routes: pairs of a pattern and a loader; the first is the default.
export function start(routes, main) {
  async function go() {
    // Other fragments are anchors in the page.
    if (location.hash && !location.hash.startsWith("#/")) return;
    const address = location.hash || "#/";
    if (address === shown) return;
    const first = shown === null;
    shown = address;
    visits += 1;
    const visit = visits;
    const { path, query } = where();
    const [load, parts] = find(routes, path);
    main.setAttribute("aria-busy", "true");
    let fill;
    try {
      fill = await (await load())({ parts, query });
    } catch (error) {
      fill = () => failed(main, error);
    }
    // The user may have opened a different view in the meantime.
    if (visit !== visits) return;
    leave();
    main.replaceChildren();
    main.removeAttribute("aria-busy");
    scrollTo(0, 0);
    leave = fill(main) ?? (() => {});
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${path}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const heading = main.querySelector("h1");
    document.title = `${heading.textContent} · hvdtrain`;
    heading.tabIndex = -1;
    if (!first) heading.focus({ preventScroll: true });
  }
  addEventListener("hashchange", go);
  go();
}

function failed(main, error) {
  if (error.name !== "ApiError") showError(error);
  main.append(
    h("h1", {}, "Not found"),
    h("p", {}, error.message),
    h("p", {}, h("a", { href: "#/" }, "All jobs")),
  );
}

export function where() {
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  return { path, query: new URLSearchParams(query) };
}

// Stores the state of a view in the URL without leaving the view.
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
