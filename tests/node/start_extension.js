// Runs the extension without an editor: prints what it starts, as JSON, for settings on the input.
const Module = require("module");
const path = require("path");

const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
const said = [];
const heard = {};

class LanguageClient {
  constructor(id, name, server, options) {
    Object.assign(this, { id, name, server, options });
  }
  async start() {
    said.push({ start: this.server, for: this.options.documentSelector });
  }
  async stop() {
    said.push({ stop: this.server });
  }
}

const listen = (name) => (call) => {
  heard[name] = call;
  return { dispose() {} };
};
const stubs = {
  vscode: {
    workspace: {
      get isTrusted() {
        return given.trusted;
      },
      getConfiguration: (section) => ({ get: (key) => given.settings[`${section}.${key}`] }),
      onDidGrantWorkspaceTrust: listen("trust"),
      onDidChangeConfiguration: listen("settings"),
    },
  },
  "vscode-languageclient/node": { LanguageClient },
};
const load = Module._load;
Module._load = (name, ...rest) => stubs[name] || load(name, ...rest);

async function main() {
  const extension = require(path.resolve(process.argv[2]));
  const context = { subscriptions: [] };
  await extension.activate(context);
  for (const event of given.events) {
    Object.assign(given, event.then || {});
    await heard[event.name](event.of && { affectsConfiguration: (section) => section === event.of });
  }
  await extension.deactivate();
  console.log(JSON.stringify({ said, subscriptions: context.subscriptions.length }));
}

main();
