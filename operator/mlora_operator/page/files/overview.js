// Totals, and the pipelines.

import { here } from "./address.js";
import { byId, el, keyed } from "./elements.js";
import { count, empty } from "./lists.js";
import { drawPipeline, makePipeline } from "./pipelines.js";
import { number } from "./words.js";

export function showOverview(overview) {
  const of = (...states) => states.reduce((sum, name) => sum + (overview.states[name] || 0), 0);
  const all = Object.values(overview.states).reduce((sum, value) => sum + value, 0);
  const training = of("Training", "Saving", "UploadBlocked");
  const figures = [
    ["Training", number(training)],
    ["Waiting", number(all - training - of("Succeeded", "Failed"))],
    ["Succeeded", number(of("Succeeded"))],
    ["Failed", number(of("Failed"))],
    ["Tokens/s", number(overview.tokensPerSecond)],
  ];
  keyed(byId("figures"), figures, ([name]) => name, () => el("div"), (node, [name, value]) => {
    node.replaceChildren(el("dt", {}, name), el("dd", {}, value));
  });
  count("pipelines", overview.pipelinesTotal);
  empty("pipelines", overview.pipelines.length === 0, here().namespace
    ? `Namespace ${here().namespace} has no pipeline, and no pipeline serves its tasks.`
    : "There is no pipeline. Apply a LoRAPipeline, or a LoRATask that names a model of the catalogue.");
  keyed(byId("pipeline-list"), overview.pipelines, (one) => `${one.namespace}/${one.name}`, makePipeline, drawPipeline);
}
