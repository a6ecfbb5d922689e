// What every script of the end-to-end tests shares: the SDK asked for, its limits, and how results go back to the Go test.
// The SDK itself is the published one, untouched.
const wanted = process.env.E2E_SDK ?? 'e2b'
export const { Sandbox } = await import(wanted)

// Milliseconds; the Go side owns all limits (tools/e2e/limits_test.go).
export const budget = Number(process.env.E2E_BUDGET_MS)
export const slow = { requestTimeoutMs: budget, timeoutMs: budget }

// report prints one line of JSON, the last of which is the script's result.
export function report(value) {
  console.log(JSON.stringify(value))
}

// listAll follows the pages.
export async function listAll(query) {
  const found = []
  const pages = Sandbox.list({ query, requestTimeoutMs: budget })
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  return found
}

export function assert(condition, message) {
  if (!condition) throw new Error(message)
}
