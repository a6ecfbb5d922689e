// Forks a sandbox in the middle of a stream, then keeps it as a snapshot and makes another from that. Usage: fork.mjs COUNT
import { Sandbox, assert, report, slow } from './sdk.mjs'

const count = Number(process.argv[2])
const parent = await Sandbox.create(slow)
report({ sandboxID: parent.sandboxId })
await parent.files.write('note', 'kept', slow)

// Counts until it is told to stop; every number has to come, whatever is done to the sandbox meanwhile.
const counting = 'i=0; until [ -e /tmp/enough ]; do i=$((i + 1)); echo $i; sleep 0.1; done'
let heard = ''
const stream = await parent.commands.run(counting, { ...slow, background: true, onStdout: (text) => { heard += text } })

const forks = await parent.fork({ ...slow, count })
assert(forks.length === count, `${forks.length} forks of ${count}`)
const draws = new Map()
for (const [i, fork] of forks.entries()) {
  assert(fork instanceof Sandbox, `fork ${i}: ${fork}`)
  report({ sandboxID: fork.sandboxId })
  assert((await fork.files.read('note', slow)) === 'kept', `fork ${i} does not have the file`)
  await fork.files.write('note', `of fork ${i}`, slow)
}
for (const [i, sandbox] of [parent, ...forks].entries()) {
  const { stdout } = await sandbox.commands.run('head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid', slow)
  for (const number of stdout.split('\n').filter((n) => n)) {
    assert(!draws.has(number), `sandbox ${i} drew ${number}, as sandbox ${draws.get(number)} did`)
    draws.set(number, i)
  }
}
assert((await parent.files.read('note', slow)) === 'kept', "a fork's file shows up in its parent")

const name = `e2e-${Date.now()}`
const snapshot = await parent.createSnapshot({ ...slow, name })
const child = await Sandbox.create(snapshot.snapshotId, slow)
report({ sandboxID: child.sandboxId })
assert((await child.files.read('note', slow)) === 'kept', 'the sandbox made from the snapshot does not have the file')
const listed = await parent.listSnapshots({ requestTimeoutMs: slow.requestTimeoutMs }).nextItems()
assert(listed.some((s) => s.snapshotId === snapshot.snapshotId), `the snapshot is not in the list: ${JSON.stringify(listed)}`)

await parent.files.write('/tmp/enough', '', slow)
const { exitCode } = await stream.wait()
const numbers = heard.trim().split('\n')
assert(exitCode === 0 && numbers.every((n, i) => Number(n) === i + 1), `the stream broke: exit code ${exitCode}, ${heard}`)

assert((await Sandbox.deleteSnapshot(snapshot.snapshotId, slow)) === true, 'deleting the snapshot')
assert((await Sandbox.deleteSnapshot(snapshot.snapshotId, slow)) === false, 'deleting it again')
report({ streamed: numbers.length })
