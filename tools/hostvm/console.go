package hostvm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// ErrFrozen means that the machine runs but nothing in it moves: its heartbeat on the console has stopped. What was
// going on in it has not failed by itself; the machine must be started again.
var ErrFrozen = errors.New("emulated host is frozen: its heartbeat stopped (torpor-hostvm down, then up)")

// ErrDown means that the instance is not running.
var ErrDown = errors.New("emulated host is not running")

// frozenAfter is how long the console may be silent. The heartbeat comes every 5 s, late when both cores are busy.
const frozenAfter = 60 * time.Second

// consolePrefix begins every line of init's.
const consolePrefix = "torpor-hostvm: "

// tail reads the last n bytes of a file, or all.
func tail(path string, n int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(max(0, end-n), io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(f)
}

// bootStage is what a console says about how far init came.
type bootStage struct {
	firstProcess string // seconds after the kernel started, as text; "" before
	ready        bool   // the exec server was started
	fatal        string // why init gave up
}

func parseConsole(text []byte) bootStage {
	var st bootStage
	for line := range bytes.Lines(text) {
		_, said, ok := strings.Cut(strings.TrimSpace(string(line)), consolePrefix)
		if !ok {
			continue
		}
		if rest, ok := strings.CutPrefix(said, "first process at "); ok {
			st.firstProcess = strings.TrimSuffix(rest, " s")
		}
		if rest, ok := strings.CutPrefix(said, "FATAL: "); ok {
			st.fatal = rest
		}
		st.ready = st.ready || strings.HasPrefix(said, "ready at ")
	}
	return st
}

// lastWords is the last line of the console that is not a heartbeat: what a machine that died said.
func lastWords(path string) string {
	b, err := tail(path, 4<<10)
	if err != nil {
		return "nothing on its console"
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		l := strings.TrimSpace(lines[i])
		if l != "" && !strings.Contains(l, consolePrefix+"alive") {
			return fmt.Sprintf("its console ends with %q", l)
		}
	}
	return "nothing on its console"
}

// quiet tells how long the console has been silent.
func quiet(path string, now time.Time) (time.Duration, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return now.Sub(st.ModTime()), nil
}
