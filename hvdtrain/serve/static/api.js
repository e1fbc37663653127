// Requests to hvdtrain serve.

export class ApiError extends Error {
  constructor(message, code = 0) {
    super(message);
    this.name = "ApiError";
    this.code = code;
  }
}

let known = null;
let clock_ahead_s = 0;

// The session, requested once.
export function session() {
  known ??= ask("/api/session").then(
    (about) => {
      clock_ahead_s = about.now - Date.now() / 1000;
      return about;
    },
    (error) => {
      known = null;
      throw error;
    },
  );
  return known;
}

// The server's time in seconds since 1970. The local clock may differ from it.
export function now() {
  return Date.now() / 1000 + clock_ahead_s;
}

export function get(path, query = {}) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query))
    if (value !== "" && value !== undefined) words.set(name, value);
  return ask(words.size ? `${path}?${words}` : path);
}

export async function post(path, body = {}) {
  const send = async () =>
    ask(path, {
      method: "POST",
      headers: { "content-type": "application/json", "x-csrf-token": (await session()).csrf },
      body: JSON.stringify(body),
    });
  try {
    return await send();
  } catch (error) {
    if (error.code !== 403) throw error;
    // A login in another tab has changed the CSRF token.
    known = null;
    return send();
  }
}

export function jobPath(name, rest = "") {
  return `/api/jobs/${encodeURIComponent(name)}${rest}`;
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { accept: "application/json", ...options.headers } });
  } catch {
    throw new ApiError("hvdtrain serve does not answer. Jobs continue without it; restart hvdtrain serve to see them.");
  }
  if (response.status === 401) {
    location.assign(`/login${location.hash}`);
    // The browser is loading the login page.
    return new Promise(() => {});
  }
  const text = await response.text();
  let content = null;
  try {
    content = JSON.parse(text);
  } catch {
    // The server sends some errors as plain text.
  }
  if (!response.ok)
    throw new ApiError(content?.error ?? (text.trim() || `The server responded with status ${response.status}.`), response.status);
  return content;
}

// Listens to events until the returned function is called. Hidden tabs don't listen, because
// browsers allow only six connections to a server.
export function listen(path, handlers, onConnection = () => {}) {
  let source = null;
  let timer = 0;

  function open() {
    close();
    source = new EventSource(path);
    source.onopen = () => onConnection(true);
    source.onerror = () => {
      onConnection(false);
      if (source.readyState === EventSource.CLOSED) timer = setTimeout(again, 3000);
    };
    for (const [kind, handle] of Object.entries(handlers)) {
      source.addEventListener(kind, (event) => handle(JSON.parse(event.data)));
    }
  }

  async function again() {
    // EventSource hides the error. If the session has expired, this request shows the login page.
    await ask("/api/session").catch(() => {});
    open();
  }

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function look() {
    if (document.hidden) close();
    else if (!source) open();
  }

  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    document.removeEventListener("visibilitychange", look);
    close();
  };
}
