package jail

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// raw makes a system call as it is and returns its error, nil for none.
func raw(number uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := unix.Syscall6(number, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}

const (
	nowhere = ^uintptr(0)       // no file, no process
	absent  = "/does/not/exist" // no path
)

// forbidden are calls that the filter answers by ending the process. Outside they do no harm: most are given arguments that
// the kernel refuses with an error, which is not being killed.
var forbidden = map[string]func() error{
	"socket unix":     func() error { return raw(unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM, 0) },
	"socket inet":     func() error { return raw(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, 0) },
	"socket vsock":    func() error { return raw(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM, 0) },
	"socketpair":      func() error { _, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err },
	"connect":         func() error { return raw(unix.SYS_CONNECT, nowhere) },
	"bind":            func() error { return raw(unix.SYS_BIND, nowhere) },
	"listen":          func() error { return raw(unix.SYS_LISTEN, nowhere) },
	"setsockopt":      func() error { return raw(unix.SYS_SETSOCKOPT, nowhere) },
	"execve":          func() error { return unix.Exec(absent, nil, nil) },
	"execveat":        func() error { return raw(unix.SYS_EXECVEAT, nowhere) },
	"fork":            func() error { return clone(uintptr(unix.SIGCHLD) | unix.CLONE_FILES) },
	"ptrace":          func() error { return unix.PtraceAttach(1 << 30) },
	"vm_readv":        func() error { return raw(unix.SYS_PROCESS_VM_READV, 1<<30) },
	"kill":            func() error { return unix.Kill(os.Getpid(), 0) },
	"pidfd_open":      func() error { _, err := unix.PidfdOpen(os.Getpid(), 0); return err },
	"pidfd_getfd":     func() error { return raw(unix.SYS_PIDFD_GETFD, nowhere) },
	"mount":           func() error { return unix.Mount("none", absent, "tmpfs", 0, "") },
	"umount":          func() error { return unix.Unmount(absent, 0) },
	"fsopen":          func() error { return raw(unix.SYS_FSOPEN) },
	"open_tree":       func() error { return raw(unix.SYS_OPEN_TREE, nowhere) },
	"move_mount":      func() error { return raw(unix.SYS_MOVE_MOUNT, nowhere) },
	"mount_setattr":   func() error { return raw(unix.SYS_MOUNT_SETATTR, nowhere) },
	"pivot_root":      func() error { return unix.PivotRoot(absent, absent) },
	"chroot":          func() error { return unix.Chroot(absent) },
	"unshare":         func() error { return unix.Unshare(unix.CLONE_FS) },
	"setns":           func() error { return raw(unix.SYS_SETNS, nowhere) },
	"setuid":          func() error { return raw(unix.SYS_SETRESUID, nowhere, nowhere, nowhere) },
	"setgid":          func() error { return raw(unix.SYS_SETRESGID, nowhere, nowhere, nowhere) },
	"setgroups":       func() error { return raw(unix.SYS_SETGROUPS, 1<<30) },
	"capset":          func() error { return raw(unix.SYS_CAPSET) },
	"prctl dumpable":  func() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) },
	"prctl securebit": func() error { return unix.Prctl(unix.PR_SET_SECUREBITS, 0, 0, 0, 0) },
	"seccomp":         func() error { return raw(unix.SYS_SECCOMP, 99) },
	"bpf":             func() error { return raw(unix.SYS_BPF, 999) },
	"userfaultfd":     func() error { return raw(unix.SYS_USERFAULTFD, nowhere) },
	"io_uring":        func() error { return raw(unix.SYS_IO_URING_SETUP) },
	"keyctl":          func() error { return raw(unix.SYS_KEYCTL, 9999) },
	"add_key":         func() error { return raw(unix.SYS_ADD_KEY) },
	"perf":            func() error { return raw(unix.SYS_PERF_EVENT_OPEN) },
	"memfd":           func() error { _, err := unix.MemfdCreate("x", 0); return err },
	"executable":      executable,
	"make executable": makeExecutable,
	"mremap":          func() error { return raw(unix.SYS_MREMAP, 0, 4096, 8192) },
	"personality":     func() error { return raw(unix.SYS_PERSONALITY, 0xffffffff) },
	"shm":             func() error { return raw(unix.SYS_SHMGET, unix.IPC_PRIVATE, 0) },
	"by handle":       func() error { return raw(unix.SYS_OPEN_BY_HANDLE_AT, nowhere) },
	"mknod":           func() error { return unix.Mknod(absent, unix.S_IFCHR, 0) },
	"mkdir":           func() error { return unix.Mkdir(absent, 0) },
	"unlink":          func() error { return unix.Unlinkat(unix.AT_FDCWD, absent, 0) },
	"rename":          func() error { return unix.Renameat(unix.AT_FDCWD, absent, unix.AT_FDCWD, absent) },
	"link":            func() error { return unix.Link(absent, absent) },
	"chmod":           func() error { return unix.Fchmodat(unix.AT_FDCWD, absent, 0, 0) },
	"fchmod":          func() error { return raw(unix.SYS_FCHMOD, nowhere) },
	"chown":           func() error { return raw(unix.SYS_FCHOWN, nowhere) },
	"xattr":           func() error { return raw(unix.SYS_FSETXATTR, nowhere) },
	"init_module":     func() error { return raw(unix.SYS_INIT_MODULE) },
	"finit_module":    func() error { return raw(unix.SYS_FINIT_MODULE, nowhere) },
	"kexec":           func() error { return raw(unix.SYS_KEXEC_LOAD, 0, 0, 0, nowhere) },
	"reboot":          func() error { return raw(unix.SYS_REBOOT) },
	"swapon":          func() error { return raw(unix.SYS_SWAPON) },
	"clock_settime":   func() error { return raw(unix.SYS_CLOCK_SETTIME, 99) },
	"adjtimex":        func() error { return raw(unix.SYS_ADJTIMEX) },
	"sethostname":     func() error { return raw(unix.SYS_SETHOSTNAME, 0, nowhere) },
	"iopl":            func() error { return raw(unix.SYS_IOPL, 4) },
	"setrlimit":       func() error { return raw(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE) },
	"setpriority":     func() error { return raw(unix.SYS_SETPRIORITY, 99) },
	"inotify":         func() error { _, err := unix.InotifyInit1(0); return err },
	"fanotify":        func() error { return raw(unix.SYS_FANOTIFY_INIT, nowhere) },
	"ioctl TIOCSTI":   func() error { return raw(unix.SYS_IOCTL, nowhere, unix.TIOCSTI) },
	"ioctl TUNSETIFF": func() error { return raw(unix.SYS_IOCTL, nowhere, unix.TUNSETIFF) },
	"ioctl UFFDIO":    func() error { return raw(unix.SYS_IOCTL, nowhere, 0xC018AA3F) },
	"fcntl SETOWN":    func() error { return raw(unix.SYS_FCNTL, nowhere, unix.F_SETOWN) },
	"fcntl LEASE":     func() error { return raw(unix.SYS_FCNTL, nowhere, unix.F_SETLEASE) },
}

// refused are calls that the filter answers with an error.
var refused = map[string]func() error{
	"open":     func() error { return open("/proc/self/status", unix.O_RDONLY) },
	"stat":     func() error { var st unix.Stat_t; return unix.Stat("/", &st) },
	"access":   func() error { return unix.Access("/", unix.R_OK) },
	"readlink": func() error { _, err := unix.Readlink("/proc/self/exe", make([]byte, 100)); return err },
}

// permitted are calls that a guest takes and that must go on working.
var permitted = map[string]func() error{
	"memory": func() error {
		_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		return err
	},
	"eventfd": func() error { _, err := unix.Eventfd(0, unix.EFD_CLOEXEC); return err },
	"random":  func() error { _, err := unix.Getrandom(make([]byte, 8), 0); return err },
	"threads": threads,
	"view":    func() error { return clone(uintptr(unix.SIGCHLD)) },
	"signal":  func() error { return unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGURG) },
}

func open(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// clone makes a process that ends at once.
func clone(flags uintptr) error {
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, flags, 0, 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	_, err := unix.Wait4(int(pid), nil, 0, nil)
	return err
}

func executable() error {
	_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON)
	return err
}

func makeExecutable() error {
	b, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	return unix.Mprotect(b, unix.PROT_READ|unix.PROT_EXEC)
}

// threads makes the runtime start threads: each of these blocks in a system call of its own.
func threads() error {
	const n = 20
	done := make(chan error, n)
	for range n {
		go func() {
			done <- unix.Nanosleep(&unix.Timespec{Nsec: 2e6}, nil)
		}()
	}
	for range n {
		if err := <-done; err != nil {
			return err
		}
	}
	return nil
}

// beyond are things that root may do and that the jail alone, without the filter, must prevent. %s is an argument of the test.
var beyond = map[string]func(arg string) error{
	"read the host's files":      func(string) error { return open("/etc/passwd", unix.O_RDONLY) },
	"walk up to the host's root": func(string) error { return open(strings.Repeat("../", 20)+"etc/passwd", unix.O_RDONLY) },
	"open the null device":       func(string) error { return open("/dev/null", unix.O_RDONLY) },
	"open the KVM device":        func(string) error { return open("/dev/kvm", unix.O_RDWR) },
	"see kernel settings":        func(string) error { return open("/proc/sys/kernel/hostname", unix.O_RDONLY) },
	"use a file not its own":     func(string) error { var st unix.Stat_t; return unix.Fstat(leakedFile, &st) },
	"write beside the program":   writeBeside,
	"make a device":              makeDevice,
	"see a host process":         func(pid string) error { return open("/proc/"+pid+"/status", unix.O_RDONLY) },
	"signal a host process":      func(pid string) error { return unix.Kill(atoi(pid), 0) },
	"reach a loopback listener":  func(address string) error { return dial("tcp", address) },
	"reach an abstract socket":   func(name string) error { return dial("unix", name) },
	"find shared memory":         func(key string) error { return raw(unix.SYS_SHMGET, uintptr(atoi(key)), 0, 0) },
	"become root":                func(string) error { return raw(unix.SYS_SETRESUID, 0, 0, 0) },
	"have a group of root's":     func(string) error { return raw(unix.SYS_SETRESGID, 0, 0, 0) },
	"change the root":            func(string) error { return unix.Chroot("/") },
	"leave the mount namespace":  func(string) error { return unix.Unshare(unix.CLONE_NEWNS) },
	"have a network":             func(string) error { return unix.Unshare(unix.CLONE_NEWNET) },
	"rename the host":            rename,
	"use I/O ports":              func(string) error { return raw(unix.SYS_IOPL, 3) },
	"load a kernel module":       func(string) error { return privilege(raw(unix.SYS_FINIT_MODULE, nowhere)) },
	"set the clock":              func(string) error { return privilege(adjustClock()) },
	"raise its limits":           func(string) error { return raiseLimit() },
	"be served before others":    func(string) error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -10) },
	"gain a capability":          func(string) error { return raw(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, 0) },
	"open a raw packet socket":   func(string) error { return raw(unix.SYS_SOCKET, unix.AF_PACKET, unix.SOCK_RAW, 0) },
	"have the machine rebooted":  func(string) error { return privilege(raw(unix.SYS_REBOOT, 1, 2, 3)) },
	"read the kernel's messages": func(string) error { return raw(unix.SYS_SYSLOG, 10) },
}

// privilege turns "you may, but the arguments are wrong" into success, for calls that must not really happen.
func privilege(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOSYS) {
		return err
	}
	return nil
}

// adjustClock asks for a tick no clock can have.
func adjustClock() error {
	const tick = 0x4000
	_, err := unix.Adjtimex(&unix.Timex{Modes: tick})
	return err
}

func writeBeside(string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	path := program[:strings.LastIndexByte(program, '/')+1] + "beside"
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	return os.Remove(path)
}

func makeDevice(string) error {
	path := "made-device"
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		return err
	}
	return os.Remove(path)
}

// rename gives the host the name it has.
func rename(string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	return unix.Sethostname([]byte(name))
}

func raiseLimit() error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return err
	}
	l.Cur = l.Max
	if l.Max == 0 {
		l = unix.Rlimit{Cur: 4096, Max: 4096}
	}
	return unix.Setrlimit(unix.RLIMIT_MEMLOCK, &l)
}
