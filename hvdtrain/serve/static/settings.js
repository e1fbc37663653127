// What jobs were asked for, setting by setting, to see in what they differ.
import { joinWords } from "./words.js";

const SAME = { "--num-proc": "-np", "--hosts": "-H", "--env": "-x" };

// Words as flags with their values, and what belongs to no flag.
export function flagsOf(words) {
  const flags = new Map();
  const rest = [];
  let flag = null;
  const add = (name, value) => flags.set(name, [...(flags.get(name) ?? []), value]);
  for (const word of words) {
    const isFlag = /^-[-\w]*[a-zA-Z]/.test(word);
    if (isFlag && flag) add(flag, "");
    if (isFlag && word.startsWith("--") && word.includes("=")) {
      const at = word.indexOf("=");
      add(named(word.slice(0, at)), word.slice(at + 1));
      flag = null;
    } else if (isFlag) flag = named(word);
    else if (flag) {
      add(flag, word);
      flag = null;
    } else rest.push(word);
  }
  if (flag) add(flag, "");
  return { flags, rest };
}

const named = (flag) => SAME[flag] ?? flag;

// A name and a text for each setting of a job.
export function settingsOf(job) {
  const options = flagsOf(job.options);
  const program = flagsOf(job.program);
  const settings = new Map([["program", joinWords(program.rest)]]);
  for (const [flag, values] of program.flags) settings.set(`program ${flag}`, said(values));
  // The last one wins, except where each adds something.
  for (const [flag, values] of options.flags)
    settings.set(flag, said(flag === "-x" ? values : values.slice(-1)));
  if (options.rest.length) settings.set("other options", joinWords(options.rest));
  settings.set("working directory", job.folder);
  settings.set("ranks", job.ranks ? String(job.ranks) : "");
  settings.set(
    "hosts",
    Object.entries(job.hosts)
      .map(([host, ranks]) => `${host}: ${ranks}`)
      .join(", "),
  );
  return settings;
}

const said = (values) => values.map((value) => value || "yes").join(", ");

// Rows [name, text of each job] of the settings in which jobs differ.
export function differences(jobs) {
  const all = jobs.map(settingsOf);
  const names = [...new Set(all.flatMap((settings) => [...settings.keys()]))];
  return names
    .map((name) => [name, ...all.map((settings) => settings.get(name) ?? "")])
    .filter(([, first, ...others]) => others.some((text) => text !== first));
}
