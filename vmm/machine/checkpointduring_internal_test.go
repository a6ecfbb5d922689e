package machine

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"
)

// underWay is a checkpoint of a machine that has been stopped, by stopping its view, while it is written.
type underWay struct {
	m      *Machine
	to     Checkpoint
	from   savedFiles
	view   int // process id
	cancel context.CancelFunc
	done   chan error
}

// beginCheckpoint restores a machine, which the caller closes, and begins a checkpoint of it.
func beginCheckpoint(t *testing.T) *underWay {
	t.Helper()
	full, _ := save(t, bootTiny(t, testConfig(1, 512*mib)), "")
	m, _, err := Restore(testConfig(1, 512*mib), full.open(t), false, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	dirty(t, m, 128*mib, 1) // so that writing it takes longer than to see it begin
	dir := t.TempDir()
	const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
	u := &underWay{m: m, from: savedFiles{state: filepath.Join(dir, "state"), base: full.base, diff: filepath.Join(dir, "diff")}, done: make(chan error, 1)}
	u.to = Checkpoint{Kind: SaveCumulative, State: openFile(t, u.from.state, create), Memory: openFile(t, u.from.diff, create)}
	ctx, cancel := context.WithCancel(t.Context())
	u.cancel = cancel
	go func() {
		_, _, err := m.Checkpoint(ctx, u.to)
		u.done <- err
	}()
	eventually(t, "there is a view", func() bool { return len(children(t)) == 1 })
	u.view = children(t)[0]
	u.signal(t, unix.SIGSTOP)
	return u
}

func (u *underWay) signal(t *testing.T, s unix.Signal) {
	t.Helper()
	if err := unix.Kill(u.view, s); err != nil {
		t.Fatal(err)
	}
}

// ended checks that nothing is left of the checkpoint.
func (u *underWay) ended(t *testing.T, want error) {
	t.Helper()
	if err := <-u.done; !errors.Is(err, want) {
		t.Errorf("the checkpoint: %v, want %v", err, want)
	}
	checkClosed(t, u.to.State, u.to.Memory)
	if pids := children(t); len(pids) > 0 {
		t.Errorf("children %v are left", pids)
	}
	closeMachine(t, u.m)
}

// Nothing waits for a checkpoint but another one, which is refused; and what becomes of the machine does not become of it.
func TestDuringACheckpoint(t *testing.T) {
	u := beginCheckpoint(t)
	at := u.m.peek(t, tinyCounter)
	counts(t, u.m, at)
	const create = os.O_CREATE | os.O_EXCL | os.O_RDWR
	dir := t.TempDir()
	second := Checkpoint{Kind: SaveFull, State: openFile(t, filepath.Join(dir, "state"), create), Memory: openFile(t, filepath.Join(dir, "mem"), create)}
	if _, _, err := u.m.Checkpoint(t.Context(), second); !errors.Is(err, ErrCheckpoint) {
		t.Errorf("a second checkpoint: %v", err)
	}
	checkClosed(t, second.State, second.Memory)
	if err := u.m.Pause(); err != nil {
		t.Fatal(err)
	}
	if _, err := saveTo(t, u.m, SaveCumulative, filepath.Join(dir, "state2"), filepath.Join(dir, "mem2")); err != nil {
		t.Errorf("a save: %v", err)
	}
	if err := u.m.Resume(); err != nil {
		t.Fatal(err)
	}
	counts(t, u.m, u.m.peek(t, tinyCounter))
	u.m.poke(t, tinyCommand, tinyReset)
	<-u.m.Done()
	u.signal(t, unix.SIGCONT)
	u.ended(t, nil)
	verify(t, u.from)
	child := restoreTiny(t, testConfig(1, 512*mib), u.from)
	if n := child.peek(t, tinyCounter); n == 0 || n > at || child.peek(t, tinyCommand) != 0 {
		t.Errorf("saved at %d, which was before %d", n, at)
	}
}

func TestCheckpointIsCancelled(t *testing.T) {
	u := beginCheckpoint(t)
	u.cancel()
	u.signal(t, unix.SIGCONT)
	u.ended(t, context.Canceled)
}

func TestCloseEndsACheckpoint(t *testing.T) {
	u := beginCheckpoint(t)
	closed := make(chan error)
	go func() { closed <- u.m.Close() }()
	<-u.m.closing
	u.signal(t, unix.SIGCONT)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := <-u.done; !errors.Is(err, ErrEnded) {
		t.Errorf("the checkpoint: %v", err)
	}
	if pids := children(t); len(pids) > 0 {
		t.Errorf("children %v are left", pids)
	}
}

// A view that is lost (its process was killed) is an error of the checkpoint alone.
func TestCheckpointLosesItsView(t *testing.T) {
	u := beginCheckpoint(t)
	u.signal(t, unix.SIGKILL)
	if err := <-u.done; err == nil {
		t.Error("it came to an end")
	} else {
		t.Log(err)
	}
	counts(t, u.m, u.m.peek(t, tinyCounter))
	u.done <- nil
	u.ended(t, nil)
}
