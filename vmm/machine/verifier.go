package machine

import (
	"fmt"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"torpor/vmm/snapshot"
)

// unverified is the runs that are mapped and that nobody has read: a bit for each run of each layer.
type unverified struct {
	layers []*snapshot.Layer
	runs   [][]bool
	any    bool
}

func newUnverified(layers []*snapshot.Layer) *unverified {
	u := &unverified{layers: layers, runs: make([][]bool, len(layers))}
	for i, l := range layers {
		u.runs[i] = make([]bool, len(l.Runs))
	}
	return u
}

func (u *unverified) add(s span) {
	u.any = true
	for _, p := range s.pieces {
		u.runs[p.Layer][p.Run] = true
	}
}

// verifier compares what was mapped with its checksums while the machine is running already. It reads the files, whose pages in
// the page cache are the ones that are mapped. Until it is done nothing may be made of the machine's memory that lasts.
type verifier struct {
	what    *unverified
	stop    atomic.Bool
	damaged chan struct{} // closed if something is
	done    chan struct{}
	err     error // once done is closed
}

// verify begins in the background, as soon as after is closed, if that is not nil. Without anything to do there is no verifier.
func (u *unverified) verify(after <-chan struct{}) *verifier {
	if u == nil || !u.any {
		return nil
	}
	v := &verifier{what: u, damaged: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(v.done)
		if after != nil {
			<-after
		}
		// The guest comes first. The thread ends with the goroutine, which never unlocks it.
		runtime.LockOSThread()
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, lowPriority)
		if err := v.run(); err != nil {
			v.err = fmt.Errorf("memory is not what was saved: %w", err)
			close(v.damaged)
		}
		v.what = nil
	}()
	return v
}

// lowPriority is the nice value of what the guest should not notice.
const lowPriority = 19

func (v *verifier) run() error {
	buf := make([]byte, snapshot.ChunkBytes)
	for i, l := range v.what.layers {
		for run, need := range v.what.runs[i] {
			if v.stop.Load() {
				return nil
			}
			if !need {
				continue
			}
			if err := l.ReadRun(l.Runs[run], buf[:l.Runs[run].Bytes()]); err != nil {
				return err
			}
		}
	}
	return nil
}

// wait returns when everything is verified, with the error if something is damaged. A nil verifier has verified everything.
func (v *verifier) wait() error {
	if v == nil {
		return nil
	}
	<-v.done
	return v.err
}

// failed is closed when something was found damaged.
func (v *verifier) failed() <-chan struct{} {
	if v == nil {
		return nil
	}
	return v.damaged
}

// end stops it and returns when it has let go of the files.
func (v *verifier) end() {
	if v == nil {
		return
	}
	v.stop.Store(true)
	<-v.done
}

// startVerifier begins to verify what was mapped, after what the guest wants first was read.
func (r *ram) startVerifier() {
	var after <-chan struct{}
	if r.prefetch != nil {
		after = r.prefetch.done
	}
	r.verifier, r.mapped = r.mapped.verify(after), nil
}
