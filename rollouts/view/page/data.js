import { h } from "./dom.js";
export function dataPage() { return { show: async () => h("p", {}, "") }; }
