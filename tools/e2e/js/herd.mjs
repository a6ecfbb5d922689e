// Eight clients of one paused auto-resume sandbox send a command at the same moment; each must get its own answer.
import { Sandbox, assert, report, slow } from './sdk.mjs'

const clients = 8
const first = await Sandbox.create({ ...slow, lifecycle: { onTimeout: 'pause', autoResume: true } })
// Each client has a connection of its own, made while the sandbox was awake.
const herd = [first]
while (herd.length < clients) herd.push(await Sandbox.connect(first.sandboxId, slow))
assert((await first.pause(slow)) === true, 'the pause')
report({ sandboxID: first.sandboxId })

const answers = await Promise.all(herd.map(async (sandbox, i) => (await sandbox.commands.run(`echo client ${i}`, slow)).stdout))
answers.forEach((text, i) => assert(text === `client ${i}\n`, `client ${i} was answered ${JSON.stringify(text)}`))
report({ answers: answers.length })
