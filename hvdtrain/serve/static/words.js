// Splits a line into words like a shell, but without expansion, and joins words to a line.

const PLAIN = /^[\w@%+=:,./-]+$/;

export function splitWords(line) {
  const words = [];
  let word = null;
  let quote = "";
  for (let at = 0; at < line.length; at += 1) {
    const letter = line[at];
    if (quote === "'") {
      if (letter === "'") quote = "";
      else word += letter;
    } else if (letter === "\\" && at + 1 < line.length && (!quote || '"\\$`'.includes(line[at + 1]))) {
      at += 1;
      word = (word ?? "") + line[at];
    } else if (quote) {
      if (letter === quote) quote = "";
      else word += letter;
    } else if (letter === "'" || letter === '"') {
      quote = letter;
      word ??= "";
    } else if (/\s/.test(letter)) {
      if (word !== null) words.push(word);
      word = null;
    } else word = (word ?? "") + letter;
  }
  if (quote) throw new Error(`A ${quote === "'" ? "single" : "double"} quote is not closed.`);
  if (word !== null) words.push(word);
  return words;
}

// The text of a program for a list. The path of the Python interpreter is left out.
export function shortProgram(words) {
  const [first = "", ...others] = words;
  return joinWords(
    [/\/python[\d.]*$/.test(first) ? first.slice(first.lastIndexOf("/") + 1) : first, ...others].filter(
      (word, at) => at || word,
    ),
  );
}

export function joinWords(words) {
  return words.map((word) => (PLAIN.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`)).join(" ");
}
