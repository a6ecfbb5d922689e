// One user's sandbox, from birth to death, with the unmodified e2b SDK: work in it, put it to sleep with its memory, wake it
// and find everything in place. Needs E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY, as `make up` prints them.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { Sandbox } from 'e2b'

// On an emulated host everything is 10 to 50 times slower than on metal; the SDK's own limits are made for metal.
const slow = { requestTimeoutMs: 600_000, timeoutMs: 600_000 }
const metadata = { user_id: 'hello', run: String(process.pid) }
const torpor = fileURLToPath(new URL('../.bin/torpor', import.meta.url))

// A process that holds a random nonce nowhere but in its own memory, counts, and tells both to whoever connects.
const keeper = `
import os, secrets, socket, threading, time
nonce, count = secrets.token_hex(16), 0
def counting():
    global count
    while True:
        count += 1
        time.sleep(0.05)
threading.Thread(target=counting, daemon=True).start()
server = socket.create_server(("127.0.0.1", 7777))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(f"{nonce} {os.getpid()} {count}\\n".encode())
    peer.close()
`

const began = performance.now()
let sandbox

try {
  sandbox = await Sandbox.create({ ...slow, metadata })
  step(`created ${sandbox.sandboxId}`)
  table()

  const python = await run(`python3 -c 'import sys; print("hello from python", sys.version.split()[0])'`)
  assert.match(python, /^hello from python 3\./)
  step(python)

  const text = `kept over the sleep: ${Math.random()}\n`
  await sandbox.files.write('/home/user/hello.txt', text, slow)
  assert.equal(await sandbox.files.read('/home/user/hello.txt', slow), text)
  step('wrote and read /home/user/hello.txt')

  const ready = withResolvers()
  await sandbox.files.write('/tmp/keeper.py', keeper, slow)
  const handle = await sandbox.commands.run('python3 /tmp/keeper.py', {
    ...slow, timeoutMs: 0, background: true, onStdout: () => ready.resolve(), onStderr: (line) => ready.reject(new Error(line)),
  })
  await ready.promise
  await handle.disconnect()
  const before = await keeperSays()
  step(`process ${before.pid} holds a nonce in memory only and has counted to ${before.count}`)

  const asleep = performance.now()
  assert.equal(await sandbox.pause(slow), true)
  step(`paused in ${since(asleep)}`)
  table()

  const listed = (await listAll({ state: ['paused'], metadata })).map((s) => [s.sandboxId, s.state, s.metadata])
  assert.deepEqual(listed, [[sandbox.sandboxId, 'paused', metadata]])
  step('is listed as paused, with its metadata')

  const awake = performance.now()
  sandbox = await Sandbox.connect(sandbox.sandboxId, slow)
  const first = await run('echo awake')
  assert.equal(first, 'awake')
  step(`woke, and ran the first command, in ${since(awake)}`)
  table()

  const after = await keeperSays()
  assert.equal(after.nonce, before.nonce, 'the nonce is the same')
  assert.equal(after.pid, before.pid, 'the process is the same')
  assert.ok(after.count >= before.count, 'the counter did not go back')
  let later = after
  for (let tries = 0; tries < 20 && later.count <= before.count; tries++) later = await keeperSays()
  assert.ok(later.count > before.count, 'the counter goes on')
  step(`same nonce, same pid ${later.pid}, counter went on to ${later.count}`)

  const asked = Date.now()
  const guest = Number(await run('date +%s.%N')) * 1000
  const answered = Date.now()
  assert.ok(guest > asked - 2000 && guest < answered + 2000, `guest clock ${guest} is not within 2 s of ${asked}..${answered}`)
  step(`the guest's clock is right (${new Date(guest).toISOString()})`)

  assert.equal(await sandbox.files.read('/home/user/hello.txt', slow), text)
  step('the file is there')

  assert.equal(await sandbox.kill(slow), true)
  assert.deepEqual(await listAll({ metadata }), [])
  await assert.rejects(Sandbox.getInfo(sandbox.sandboxId, slow))
  step('killed, and gone')
  table()
} catch (error) {
  console.error('FAILED:', error)
  process.exitCode = 1
  await sandbox?.kill(slow).catch(() => {})
}

async function run(command) {
  const result = await sandbox.commands.run(command, slow)
  return result.stdout.trim()
}

async function keeperSays() {
  const [nonce, pid, count] = (await run('exec 3<>/dev/tcp/127.0.0.1/7777; cat <&3')).split(' ')
  assert.match(nonce, /^[0-9a-f]{32}$/)
  return { nonce, pid: Number(pid), count: Number(count) }
}

async function listAll(query) {
  const found = []
  const pages = Sandbox.list({ query, ...slow })
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  return found
}

function withResolvers() {
  const out = {}
  out.promise = new Promise((resolve, reject) => Object.assign(out, { resolve, reject }))
  return out
}

function since(start) {
  return `${((performance.now() - start) / 1000).toFixed(2)} s`
}

function step(text) {
  console.log(`[${since(began).padStart(8)}] ${text}`)
}

// Shows both truths, the VM's and envd's, where the torpor CLI has been built.
function table() {
  if (!existsSync(torpor)) return
  const rows = JSON.parse(execFileSync(torpor, ['ps', '--json'], { encoding: 'utf8' }))
  for (const row of rows.filter((r) => r.sandboxID === sandbox.sandboxId)) {
    console.log(`           torpor ps: vm ${row.vm.state}, envd ${row.envd.state}, incarnation ${row.incarnation}`)
  }
}
