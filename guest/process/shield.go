package process

import (
	"fmt"
	"os"
	"strconv"
	"sync"
)

const oomAdjust = "/proc/self/oom_score_adj"

// shield keeps the daemon out of the kernel's out-of-memory killer without its children inheriting that: a score is
// inherited at fork and cannot be set for a child before it runs. So the daemon takes the children's score for the
// moment of a start. A nil shield just starts.
type shield struct {
	mu       sync.Mutex
	own, kid int
}

// newShield protects the daemon with score own (-1000 to 1000) and gives kid to its children.
func newShield(own, kid int) (*shield, error) {
	s := &shield{own: own, kid: kid}
	return s, adjust(own)
}

func (s *shield) start(path string, argv []string, attr *os.ProcAttr) (*os.Process, error) {
	if s == nil {
		return os.StartProcess(path, argv, attr)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := adjust(s.kid); err != nil {
		return nil, err
	}
	p, err := os.StartProcess(path, argv, attr)
	if restoreErr := adjust(s.own); restoreErr != nil && err == nil {
		// The process runs and is the user's; the daemon goes on without its shield.
		s.own = s.kid
	}
	return p, err
}

func adjust(score int) error {
	if err := os.WriteFile(oomAdjust, []byte(strconv.Itoa(score)), 0); err != nil {
		return fmt.Errorf("setting the out-of-memory score: %w", err)
	}
	return nil
}
