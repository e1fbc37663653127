// Starts the page.
import { post, session } from "./api.js";
import { showError } from "./notices.js";
import { start } from "./router.js";

const main = document.getElementById("main");

document.getElementById("skip").addEventListener("click", (event) => {
  // Otherwise the router would treat the fragment as the name of a view.
  event.preventDefault();
  main.focus();
});

const themes = document.getElementById("theme");
const isDark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function nameTheme() {
  const [sign, words] = themes.children;
  sign.textContent = isDark() ? "☀" : "☾";
  words.textContent = themes.title = isDark() ? "Use light colours" : "Use dark colours";
}
themes.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
  nameTheme();
  dispatchEvent(new Event("themechange"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  nameTheme();
  dispatchEvent(new Event("themechange"));
});
nameTheme();

document.getElementById("logout").addEventListener("click", () => {
  post("/logout").then(() => location.assign("/login"), showError);
});

addEventListener("unhandledrejection", (event) => showError(event.reason));

session().then(({ version, read_only }) => {
  document.getElementById("version").textContent = `hvdtrain ${version}${read_only ? " · read only" : ""}`;
}, showError);
start(
  [
    [/^\/$/, async () => (await import("./jobs.js")).jobsView],
    [/^\/jobs\/([^/]+)$/, async () => (await import("./job.js")).jobView],
    [/^\/submit$/, async () => (await import("./submit.js")).submitView],
    [/^\/compare$/, async () => (await import("./compare.js")).compareView],
  ],
  main,
);
