package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"torpor/api/envd"
	"torpor/api/envd/envdconnect"
	"torpor/vmm/cow"
)

// script runs a shell script as root in the guest and returns what it printed. It fails the test unless the script succeeds.
func (g *guest) script(t *testing.T, script string) string {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return g.dial(ctx, healthPort) },
	}}
	ctx, cancel := context.WithTimeout(t.Context(), guestTimeout)
	defer cancel()
	noStdin := false
	req := connect.NewRequest(&envd.StartRequest{
		Process: &envd.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", "PATH=$PATH:/usr/sbin\n" + script}}, Stdin: &noStdin,
	})
	req.Header().Set("Authorization", "Basic cm9vdDo=") // root, without a password
	stream, err := envdconnect.NewProcessClient(client, "http://guest", connect.WithProtoJSON()).Start(ctx, req)
	if err != nil {
		t.Fatalf("%.80q: %v", script, err)
	}
	defer stream.Close()
	var out bytes.Buffer
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		out.Write(event.GetData().GetStdout())
		out.Write(event.GetData().GetStderr())
		if end := event.GetEnd(); end != nil {
			if end.GetExitCode() != 0 {
				t.Fatalf("%.80q: %s\n%s", script, end.GetStatus(), &out)
			}
			return out.String()
		}
	}
	t.Fatalf("%.80q: %v\n%s", script, stream.Err(), &out)
	return ""
}

// topLayer is the file that takes the guest's writes.
func (g *guest) topLayer() string { return g.layers[len(g.layers)-1] }

// onDisk opens what is in the files of the guest's disk now: what is left if the VMM is killed.
func (g *guest) onDisk(t *testing.T, i image) *cow.Chain {
	t.Helper()
	c, err := cow.OpenChain(i.Rootfs, g.layers, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func roomOf(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// diskTool is a Python program of the guest: "extents" prints where the extents of a file lie on its disk, "zero" and "discard"
// do that to the blocks under a file, below its file system.
const diskTool = `
import array, fcntl, os, struct, sys
def extents(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    b = array.array('B', struct.pack('=QQLLLL', 0, 2**64 - 1, 1, 0, 64, 0) + bytes(56 * 64))
    fcntl.ioctl(fd, 0xC020660B, b)  # FS_IOC_FIEMAP
    n = struct.unpack_from('=L', b, 20)[0]
    return [struct.unpack_from('=QQQ', b, 32 + 56 * i) for i in range(n)]
what, path = sys.argv[1], sys.argv[2]
found = extents(path)
if what == 'extents':
    for logical, physical, length in found:
        print(physical, length)
else:
    disk = os.open('/dev/vda', os.O_RDWR)
    for logical, physical, length in found:
        fcntl.ioctl(disk, {'zero': 0x127f, 'discard': 0x1277}[what], struct.pack('=QQ', physical, length))
`

// diskWorkload writes random blocks of a file and reads them back from the disk until it is told to stop; then it reads all.
const diskWorkload = `
import os, random, sys, zlib
N, B = 2048, 4096
fd = os.open('/root/blocks', os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, N * B)
sums, done = [zlib.crc32(bytes(B))] * N, 0
def check(b):
    got = zlib.crc32(os.pread(fd, B, b * B))
    if got != sums[b]:
        print('block', b, 'has other bytes after', done, 'writes', flush=True)
        sys.exit(1)
while not os.path.exists('/root/stop'):
    for i in range(32):
        b, n = random.randrange(N), random.choice([1, 1, 2, 8, 32])
        n = min(n, N - b)
        p = os.urandom(n * B)
        os.pwrite(fd, p, b * B)
        for k in range(n):
            sums[b + k] = zlib.crc32(p[k * B:(k + 1) * B])
        done += 1
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for i in range(32):
        check(random.randrange(N))
os.fdatasync(fd)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
for b in range(N):
    check(b)
print('ok', done, flush=True)
`

func TestRealGuestDisk(t *testing.T) {
	i := needImage(t)
	g := bootGuest(t, i, 1)
	g.script(t, "cat > /root/disk.py <<'EOF'\n"+diskTool+"\nEOF\ncat > /root/work.py <<'EOF'\n"+diskWorkload+"\nEOF\n")
	if got := strings.TrimSpace(g.script(t, "cat /sys/block/vda/serial")); got != "root" {
		t.Errorf("the guest's disk is called %q", got)
	}
	testTrim(t, g)
	testZeroes(t, g)
	testSynced(t, i, g)
	testDiskAcrossSleep(t, i, g)
}

// testTrim: what the guest's file system no longer uses leaves the layer.
func testTrim(t *testing.T, g *guest) {
	const size = 32 << 20
	g.script(t, "fstrim /; head -c 32M /dev/urandom > /root/big; sync")
	full := roomOf(t, g.topLayer())
	if full < size {
		t.Errorf("a file of %d bytes, and the layer takes %d", size, full)
	}
	t.Log(g.script(t, "rm /root/big; sync; fstrim -v /"))
	trimmed := roomOf(t, g.topLayer())
	t.Logf("the layer took %d KiB, and %d KiB after fstrim", full>>10, trimmed>>10)
	if trimmed > full-size*9/10 {
		t.Errorf("fstrim left %d of %d bytes", trimmed, full)
	}
}

// testZeroes: write-zeroes and discard reach the disk under a file.
func testZeroes(t *testing.T, g *guest) {
	for _, what := range []string{"zero", "discard"} {
		g.script(t, fmt.Sprintf(`set -e
			head -c 8M /dev/urandom > /root/z; sync
			python3 /root/disk.py %s /root/z
			echo 3 > /proc/sys/vm/drop_caches
			cmp /root/z <(head -c 8M /dev/zero); rm /root/z`, what))
	}
}

// testSynced: what the guest synced is in the files, and stays there if the VMM is killed.
func testSynced(t *testing.T, i image, g *guest) {
	sum := strings.Fields(g.script(t, "head -c 3000000 /dev/urandom > /root/kept; sync; sha256sum /root/kept"))[0]
	disk := g.onDisk(t, i)
	var got []byte
	for line := range strings.Lines(g.script(t, "python3 /root/disk.py extents /root/kept")) {
		var at, n int64
		if _, err := fmt.Sscan(line, &at, &n); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		p := make([]byte, n)
		if _, err := disk.ReadAt(p, at); err != nil {
			t.Fatal(err)
		}
		got = append(got, p...)
	}
	if len(got) < 3000000 {
		t.Fatalf("the file's extents have %d bytes", len(got))
	}
	if is := sha256.Sum256(got[:3000000]); hex.EncodeToString(is[:]) != sum {
		t.Error("a file that was synced is not on the disk")
	}
}

// testDiskAcrossSleep: a guest that writes and reads all the time finds its bytes, however often it sleeps.
func testDiskAcrossSleep(t *testing.T, i image, g *guest) {
	g.script(t, "setsid python3 /root/work.py > /root/work.log 2>&1 < /dev/null &")
	base := ""
	for cycle := range *cycles {
		time.Sleep(time.Second) // let it work
		from, saved := timedSave(t, g, base)
		if base == "" {
			base = from.base
		}
		t.Logf("cycle %d: %+v", cycle, saved)
		if err := cow.Verify(g.topLayer()); err != nil {
			t.Error(err)
		}
		g = restoreGuest(t, i, g, from)
		g.health(t)
	}
	out := g.script(t, `touch /root/stop
		for i in $(seq 600); do [ -s /root/work.log ] && break; sleep 0.1; done
		cat /root/work.log`)
	t.Logf("the workload says %q", out)
	if !strings.HasPrefix(out, "ok ") {
		t.Error("the workload found other bytes")
	}
	g.clean(t)
}
