// Starts `schedlang lsp` for .sched files; all that it says is the server's.
const vscode = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

async function start() {
  const settings = vscode.workspace.getConfiguration("schedlang");
  const model = vscode.workspace.isTrusted && settings.get("model");
  const server = { command: settings.get("command"), args: ["lsp", model ? "--model" : "--no-model"] };
  client = new LanguageClient("schedlang", "schedlang", server, {
    documentSelector: [{ scheme: "file", language: "sched" }],
  });
  await client.start();
}

async function restart() {
  await deactivate();
  await start();
}

async function activate(context) {
  context.subscriptions.push(
    vscode.workspace.onDidGrantWorkspaceTrust(restart),
    vscode.workspace.onDidChangeConfiguration((e) => e.affectsConfiguration("schedlang") && restart()),
  );
  await start();
}

async function deactivate() {
  if (client) await client.stop();
  client = undefined;
}

module.exports = { activate, deactivate };
