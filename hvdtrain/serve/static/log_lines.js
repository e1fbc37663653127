// Creates the elements of log lines.
import { h, marked } from "./dom.js";
import { bytes, clock, date, plain } from "./format.js";

const LAUNCHER = -1;

// line: [begin, end, time, rank, stream, text], or [begin, end] for a gap.
export function lineElement(line, wanted) {
  const [begin, end, time_s, rank, stream, text] = line;
  if (line.length === 2)
    return keep(
      h("div", { class: "line gap" }, `${bytes(end - begin)} of the log were removed`),
      begin,
      end,
    );
  const launcher = rank === LAUNCHER;
  const element = h(
    "div",
    { class: launcher ? "line launcher" : `line ${stream}` },
    h("time", { title: date(time_s) }, clock(time_s)),
    h(
      "span",
      { class: "rank" },
      launcher ? "hvdtrain" : String(rank),
      !launcher && stream === "stderr" && h("small", {}, " err"),
    ),
    h("span", { class: "text" }, marked(plain(text), wanted)),
  );
  return keep(element, begin, end);
}

function keep(element, begin, end) {
  element.positions = [begin, end];
  return element;
}
