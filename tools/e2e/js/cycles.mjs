// Pauses and connects one sandbox again and again. After each connect the very first command has to work. Usage: cycles.mjs N
import { Sandbox, assert, report, slow } from './sdk.mjs'

const cycles = Number(process.argv[2])
const firstCommandMs = Number(process.env.E2E_FIRST_COMMAND_MS)

// Auto-resume: a request that comes while the sandbox is falling asleep is then served (the sandbox wakes again for it);
// without, E2B's answer to it is a 502, and the poller could not tell that from a broken wake.
let sandbox = await Sandbox.create({ ...slow, lifecycle: { onTimeout: 'pause', autoResume: true } })
report({ sandboxID: sandbox.sandboxId })

const failures = []
for (let i = 0; i < cycles; i++) {
  const paused = await sandbox.pause(slow)
  assert(paused === true, `pause ${i} answered ${paused}`)
  sandbox = await Sandbox.connect(sandbox.sandboxId, slow)
  try {
    const result = await sandbox.commands.run(`echo cycle ${i}`, { timeoutMs: firstCommandMs, requestTimeoutMs: firstCommandMs })
    assert(result.stdout === `cycle ${i}\n`, `the first command after connect ${i} said ${JSON.stringify(result.stdout)}`)
  } catch (error) {
    failures.push(`${i}: ${error}`)
  }
}
report({ failures })
