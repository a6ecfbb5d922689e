package jail

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
)

// word is the first argument of a program that shall enter a jail.
const word = "jailed"

// Spec is a jail.
type Spec struct {
	UID    int      // user and group, nobody else's; never 0
	Files  int      // descriptors 0 to Files-1 are the process's; all others are closed
	Limits Limits   // what one process may take
	Args   []string // of the program once it is inside, its name not included
}

// Limits are resource limits (setrlimit(2)). They are never raised above those of the caller.
type Limits struct {
	OpenFiles uint64
	Threads   uint64 // of the user
	FileBytes uint64 // the end of the furthest write
}

// DefaultLimits suffice for every machine there can be: 1,023 vsock connections; 8 vCPUs, the workers of 8 disks and the threads
// of the Go runtime; and the largest disk or memory that is written to a file.
var DefaultLimits = Limits{OpenFiles: 2048, Threads: 512, FileBytes: 1 << 40}

func (s *Spec) flags(name string) *flag.FlagSet {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.IntVar(&s.UID, "uid", 0, "")
	f.IntVar(&s.Files, "files", 0, "")
	f.Uint64Var(&s.Limits.OpenFiles, "open-files", 0, "")
	f.Uint64Var(&s.Limits.Threads, "threads", 0, "")
	f.Uint64Var(&s.Limits.FileBytes, "file-bytes", 0, "")
	return f
}

// Argv is the argument list, the program's name not included, that makes it enter the jail and then run with s.Args.
func (s Spec) Argv() []string {
	argv := []string{
		word, "-uid", strconv.Itoa(s.UID), "-files", strconv.Itoa(s.Files),
		"-open-files", strconv.FormatUint(s.Limits.OpenFiles, 10), "-threads", strconv.FormatUint(s.Limits.Threads, 10),
		"-file-bytes", strconv.FormatUint(s.Limits.FileBytes, 10), "--",
	}
	return append(argv, s.Args...)
}

// Asked reports whether a program was started with an Argv, and of which Spec. args are without the program's name.
func Asked(args []string) (s Spec, asked bool, err error) {
	if len(args) == 0 || args[0] != word {
		return Spec{}, false, nil
	}
	f := s.flags(word)
	if err := f.Parse(args[1:]); err != nil {
		return Spec{}, true, fmt.Errorf("jail: %w", err)
	}
	s.Args = f.Args()
	return s, true, s.validate()
}

func (s Spec) validate() error {
	switch {
	case s.UID < 1 || s.UID >= 1<<32-1: // 2^32-1 means "leave as it is" to setresuid
		return fmt.Errorf("jail: %d cannot be the user of a jail", s.UID)
	case s.Files < 3:
		return fmt.Errorf("jail: %d files, and there are three standard ones", s.Files)
	case s.Limits.OpenFiles == 0 || s.Limits.Threads == 0 || s.Limits.FileBytes == 0:
		return errors.New("jail: limits are missing")
	}
	return nil
}
