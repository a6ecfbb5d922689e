package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"torpor/tools/rest"
)

// witnessPort is where the witness listens in the sandbox.
const witnessPort = 8000

// witnessCode is a program that keeps something in every place a sandbox can keep something, goes on changing it, and tells whoever asks
// over HTTP whether all of it is still as it left it: memory, a file of a tmpfs, a file that is written and never synced, a database, and
// the clocks. Nothing of its nonce is ever in a file, an argument or an environment.
const witnessCode = `
import hashlib, http.server, json, os, secrets, sqlite3, threading, time
nonce, block, count, back, rows = secrets.token_hex(16), os.urandom(1 << 20), 0, 0.0, 0
kept = os.urandom(1 << 20)
with open("/dev/shm/kept", "wb") as f:
    f.write(kept)
unsynced, written = open("/home/user/unsynced", "wb", buffering=0), hashlib.sha256()
db = sqlite3.connect("/home/user/witness.db", check_same_thread=False, isolation_level=None)
db.execute("pragma synchronous = full")
db.execute("create table t (n integer primary key, random text)")
lock, last = threading.Lock(), time.monotonic()
def tick():
    global count, last, back, rows
    count += 1
    line = b"%d %s\n" % (count, secrets.token_hex(8).encode())
    unsynced.write(line)
    written.update(line)
    if count % 20 == 0:
        db.execute("insert into t values (?, ?)", (count, secrets.token_hex(8)))
        rows += 1
    now = time.monotonic()
    back, last = max(back, last - now), now
def work():
    while True:
        with lock:
            tick()
        time.sleep(0.1)
def digest(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()
def wrong():
    if digest("/dev/shm/kept") != hashlib.sha256(kept).hexdigest():
        yield "the file in the tmpfs is another"
    if digest("/home/user/unsynced") != written.hexdigest():
        yield "the file that was never synced is another"
    if db.execute("pragma integrity_check").fetchall() != [("ok",)]:
        yield "the database is damaged"
    if db.execute("select count(*) from t").fetchone() != (rows,):
        yield "the database has lost rows"
    if back > 0:
        yield "the monotonic clock went back by %f s" % back
class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        with lock:
            said = {"realtime": time.time()}
            tick()
            said |= {"nonce": nonce, "pid": os.getpid(), "block": hashlib.sha256(block).hexdigest(), "count": count, "rows": rows,
                     "monotonic": time.monotonic(), "wrong": list(wrong())}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
threading.Thread(target=work, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Answer).serve_forever()
`

// testimony is what the witness says.
type testimony struct {
	Nonce, Block        string
	PID, Count, Rows    int
	Realtime, Monotonic float64 // seconds
	Wrong               []string
}

// witness is the program in one sandbox, and what it said last.
type witness struct {
	sb   rest.Sandbox
	last testimony
}

func startWitness(t *testing.T, sb rest.Sandbox) *witness {
	t.Helper()
	const start = `setsid -f python3 -c "$1" </dev/null >/tmp/witness.log 2>&1
until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done`
	var stderr strings.Builder
	code, err := sys.Exec(within(t, commandLimit), sb, rest.Command{Argv: []string{"bash", "-c", start, "witness", witnessCode}, Stderr: &stderr})
	if err != nil || code != 0 {
		t.Fatalf("starting the witness: code %d, %v: %s", code, err, &stderr)
	}
	w := &witness{sb: sb}
	if w.last, err = w.ask(within(t, callLimit)); err != nil {
		t.Fatal(err)
	}
	return w
}

// ask goes to the witness's port as a browser would; it wakes a sandbox that wakes on requests.
func (w *witness) ask(ctx context.Context) (testimony, error) {
	var said testimony
	body, err := sys.getPort(ctx, w.sb, witnessPort)
	if err != nil {
		return said, err
	}
	if err := json.Unmarshal(body, &said); err != nil {
		return said, fmt.Errorf("the witness said %q: %w", body, err)
	}
	return said, nil
}

// check demands that the witness is the same process, that it has gone on, and that it misses nothing.
func (w *witness) check(t *testing.T) testimony {
	t.Helper()
	said, err := w.ask(within(t, callLimit))
	if err != nil {
		t.Fatalf("asking the witness: %v", err)
	}
	for _, wrong := range w.judge(said) {
		t.Error(wrong)
	}
	w.last = said
	return said
}

// judge lists what in a testimony does not follow from the last one.
func (w *witness) judge(said testimony) []string {
	wrong := said.Wrong
	if said.Nonce != w.last.Nonce || said.PID != w.last.PID || said.Block != w.last.Block {
		wrong = append(wrong, fmt.Sprintf("memory was not kept: %+v, before %+v", said, w.last))
	}
	if said.Count <= w.last.Count || said.Rows < w.last.Rows {
		wrong = append(wrong, fmt.Sprintf("it went back: count %d after %d, rows %d after %d", said.Count, w.last.Count, said.Rows, w.last.Rows))
	}
	if said.Monotonic < w.last.Monotonic {
		wrong = append(wrong, fmt.Sprintf("the monotonic clock went back from %f to %f", w.last.Monotonic, said.Monotonic))
	}
	return wrong
}

// getPort sends GET / to a port of a sandbox and returns the body of a 200.
func (s *system) getPort(ctx context.Context, sb rest.Sandbox, port int) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Sandbox+"/", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("E2b-Sandbox-Id", sb.SandboxID)
	req.Header.Set("E2b-Sandbox-Port", fmt.Sprint(port))
	resp, err := s.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("port %d answered %d: %s", port, resp.StatusCode, body)
	}
	return body, err
}
