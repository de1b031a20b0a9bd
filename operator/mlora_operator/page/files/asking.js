// Asks the operator's API.

import { here } from "./address.js";

const TRIES = 8; // behind a Service of several replicas, until the one that leads answers

class Trouble extends Error {
  constructor(kind, message) { super(message); this.kind = kind; }
}

const tags = new Map(); // URL -> its last ETag
export const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// The answer, or null when it is the same as before.
export async function ask(path, query) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  if (here().namespace) asked.set("namespace", here().namespace);
  const url = `api/v1/${path}?${asked}`;
  for (let attempt = 1; ; attempt += 1) {
    const response = await reach(url);
    if (response.status === 304) return null;
    const json = (response.headers.get("Content-Type") || "").startsWith("application/json");
    if (!json) throw new Trouble("proxy", "A proxy answered instead of the operator. Reload the page to sign in again.");
    const body = await response.json();
    if (response.ok) {
      tags.set(url, response.headers.get("ETag"));
      return body;
    }
    if (body.error !== "following" || attempt === TRIES) throw new Trouble(body.error, body.message);
    await pause(200);
  }
}

async function reach(url) {
  const tag = tags.get(url);
  try {
    return await fetch(url, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  } catch {
    throw new Trouble("away", "The operator does not respond.");
  }
}

// The next answers come whole, whatever was known.
export function forget() {
  tags.clear();
}
