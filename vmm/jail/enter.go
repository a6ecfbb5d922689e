package jail

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// hostname is every jail's own.
const hostname = "torpor"

// Enter puts the process into the jail and starts the program there anew; it returns only on error, and then the process must
// end. Preconditions: it is root and the first process of its pid namespace.
func Enter(s Spec) error {
	if err := s.validate(); err != nil {
		return err
	}
	// Namespaces and credentials are changed for this thread alone, and exec makes it the whole process.
	runtime.LockOSThread()
	if os.Getpid() != 1 {
		return errors.New("jail: it takes a pid namespace of its own")
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("jail: find the program: %w", err)
	}
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"leave the host's namespaces", leaveNamespaces},
		{"change the root", func() error { return changeRoot(program) }},
		{"limit resources", s.Limits.set},
		{"close files", func() error { return unix.CloseRange(uint(s.Files), math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) }},
		{"give up privileges", func() error { return becomeUser(s.UID) }},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("jail: %s: %w", step.what, err)
		}
	}
	err = unix.Exec(programPath, append([]string{program}, s.Args...), environment)
	return fmt.Errorf("jail: run %s, which everybody must be able to read and execute: %w", program, err)
}

// environment is all of the program's. A huge page is larger than the whole heap of a VMM, and there is one for each sandbox;
// PR_SET_THP_DISABLE would take them from guests, too.
var environment = []string{"GODEBUG=disablethp=1"}

// leaveNamespaces is done here and not by whoever starts the process: a network namespace takes its time, during which a Go
// program can start no other process; and so the mounts below can never hit the host's.
func leaveNamespaces() error {
	const fresh = unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP
	if err := unix.Unshare(fresh); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	return os.NewSyscallError("sethostname", unix.Sethostname([]byte(hostname)))
}

func (l Limits) set() error {
	for _, r := range []struct {
		resource int
		name     string
		limit    uint64
	}{
		{unix.RLIMIT_NOFILE, "open files", l.OpenFiles},
		{unix.RLIMIT_NPROC, "threads", l.Threads},
		{unix.RLIMIT_FSIZE, "file size", l.FileBytes},
		{unix.RLIMIT_CORE, "core dumps", 0}, // one would hold the guest's memory
		{unix.RLIMIT_MEMLOCK, "locked memory", 0},
		{unix.RLIMIT_MSGQUEUE, "message queues", 0},
	} {
		var now unix.Rlimit
		if err := unix.Getrlimit(r.resource, &now); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		limit := min(r.limit, now.Max)
		if err := unix.Setrlimit(r.resource, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

// becomeUser changes this thread from root to the user, without a way back: no capability is left in any set, and no program
// started from here on can gain one.
func becomeUser(uid int) error {
	for c := uintptr(0); ; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) && c > unix.CAP_AUDIT_READ {
			break // the kernel knows no more of them
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("drop ambient capabilities: %w", err)
	}
	// Not the functions of these names: they would change all threads, of which exec leaves only this one anyway.
	id := uintptr(uid)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return os.NewSyscallError("setgroups", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, id, id, id); errno != 0 {
		return os.NewSyscallError("setresgid", errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, id, id, id); errno != 0 {
		return os.NewSyscallError("setresuid", errno)
	}
	// That emptied the effective and permitted sets; this does the inheritable one.
	var none [2]unix.CapUserData
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		return os.NewSyscallError("capset", err)
	}
	return noNewPrivileges()
}

// noNewPrivileges makes exec unable to give privileges (prctl(2), PR_SET_NO_NEW_PRIVS). It is also what an unprivileged
// process must promise to be given a filter.
func noNewPrivileges() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl PR_SET_NO_NEW_PRIVS", err)
	}
	return nil
}
