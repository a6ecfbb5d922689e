package vmproc

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"torpor/api/vmmpb"
)

// A VMM can be started before its machine is known. Until it is claimed it goes by a name that no machine has; to Scan and
// everybody else it is then the VMM of the machine that claimed it.

const (
	aheadPrefix = "ahead-"
	// aheadBytes makes a name long enough for the names of machines to fit in its place (api/id: 21 characters).
	aheadBytes = 13
)

// errLongName says that a machine's name does not fit in the place of that of a VMM that was started ahead.
var errLongName = errors.New("the machine's name is longer than that of a VMM started ahead")

// StartAhead starts a VMM for a machine of so many vCPUs that is not known yet. See Claim and Discard.
func (s *Supervisor) StartAhead(ctx context.Context, vcpus uint32) (*Process, error) {
	var random [aheadBytes]byte
	rand.Read(random[:]) // never fails
	name := aheadPrefix + hex.EncodeToString(random[:])
	p, err := s.Start(ctx, name, s.aheadLog(name))
	if err != nil {
		return nil, errors.Join(err, s.clearAhead(name))
	}
	p.ahead = name
	if _, err := p.Prepare(ctx, &vmmpb.PrepareRequest{Vcpus: vcpus}); err != nil {
		return nil, errors.Join(err, s.Discard(context.WithoutCancel(ctx), p))
	}
	return p, nil
}

// aheadLog is where its log goes until it is claimed.
func (s *Supervisor) aheadLog(name string) string { return s.Dir(name) + ".log" }

func (s *Supervisor) clearAhead(name string) error {
	return errors.Join(s.Clear(name), os.RemoveAll(s.aheadLog(name)))
}

// Claim makes a process that was started ahead the VMM of the machine called name, as if it had been started so. The process
// learns of it with its Boot or Restore. On error it is as it was, and may be discarded.
func (s *Supervisor) Claim(p *Process, name, logPath string) error {
	if len(name) > len(p.ahead) {
		return errLongName
	}
	if err := os.RemoveAll(s.Dir(name)); err != nil {
		return fmt.Errorf("clear socket directory: %w", err)
	}
	if err := os.Rename(s.Dir(p.ahead), s.Dir(name)); err != nil {
		return fmt.Errorf("claim a VMM: %w", err)
	}
	_ = os.Remove(s.aheadLog(p.ahead)) // litter, of which the next SweepAhead knows
	p.ahead = ""
	p.files = filepath.Join(s.Dir(name), filesSocket)
	p.claim = &vmmpb.Claim{Directory: s.Dir(name), Log: logPath}
	return nil
}

// Discard ends a process that was started ahead and not claimed.
func (s *Supervisor) Discard(ctx context.Context, p *Process) error {
	return errors.Join(p.Kill(ctx), s.clearAhead(p.ahead))
}

// SweepAhead removes what VMMs that were started ahead by an agent that was killed have left. They must have ended.
func (s *Supervisor) SweepAhead() error {
	entries, err := os.ReadDir(s.RunDir)
	if err != nil {
		return fmt.Errorf("sweep the socket directories: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), aheadPrefix) {
			errs = append(errs, s.Clear(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// claimed adds to the first request what a process that was started ahead must know.
func (p *Process) claimed(m *vmmpb.Machine) {
	if p.claim != nil && m != nil {
		m.Claim, p.claim = p.claim, nil
	}
}
