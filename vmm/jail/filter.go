package jail

import "golang.org/x/sys/unix"

// goThread is how the Go runtime makes a thread (runtime/os_linux.go, cloneFlags, and CLONE_SETTLS from its assembly).
const goThread = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_SYSVSEM | unix.CLONE_THREAD | unix.CLONE_SETTLS

// view is how a view of memory is taken (package memview): the child of a plain clone, which has this filter, too, and is counted
// by the same limits on threads as the threads are.
const view = uint32(unix.SIGCHLD)

// always are the calls that are let through whatever their arguments are: they reach nothing but this process and the files
// it has open. Those that are made most come first.
var always = []uint32{
	// The Go runtime's scheduler and poller.
	unix.SYS_FUTEX, unix.SYS_EPOLL_PWAIT, unix.SYS_NANOSLEEP, unix.SYS_SCHED_YIELD, unix.SYS_CLOCK_GETTIME,
	unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_CREATE1, unix.SYS_EVENTFD2, unix.SYS_SCHED_GETAFFINITY, unix.SYS_UNAME,
	// Its signals. tgkill finds only threads of the own pid namespace.
	unix.SYS_RT_SIGRETURN, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGACTION, unix.SYS_SIGALTSTACK, unix.SYS_TGKILL,
	unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_RESTART_SYSCALL, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	// Its memory, and the guest's.
	unix.SYS_MADVISE, unix.SYS_MUNMAP,
	// Open files: device notifications, disks, snapshots, logs.
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_PREADV,
	unix.SYS_PWRITEV, unix.SYS_CLOSE, unix.SYS_FSTAT, unix.SYS_LSEEK, unix.SYS_FDATASYNC, unix.SYS_FSYNC, unix.SYS_FTRUNCATE,
	unix.SYS_FALLOCATE, unix.SYS_FLOCK, unix.SYS_POLL, unix.SYS_DUP3,
	// Open sockets.
	unix.SYS_RECVMSG, unix.SYS_SENDMSG, unix.SYS_RECVFROM, unix.SYS_SENDTO, unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN,
	unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT,
	// A view of memory: the pipes to it, what it inherits and does not want, its end.
	unix.SYS_PIPE2, unix.SYS_CLOSE_RANGE, unix.SYS_WAIT4,
	// Random numbers for the guest.
	unix.SYS_GETRANDOM,
}

// lookups fail as they do for a user without rights: the Go library makes them when it wants to know something of the host
// (a time zone, a kernel setting) and lives without the answer.
var lookups = []uint32{
	unix.SYS_OPEN, unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_STAT, unix.SYS_LSTAT, unix.SYS_NEWFSTATAT, unix.SYS_STATX,
	unix.SYS_ACCESS, unix.SYS_FACCESSAT, unix.SYS_FACCESSAT2, unix.SYS_READLINK, unix.SYS_READLINKAT,
}

// rules is the filter. ioctls are the requests that are let through.
func rules(ioctls []uint32) []rule {
	out := []rule{
		{number: unix.SYS_IOCTL, when: []match{{1, whole, ioctls}}, then: allow, others: kill},
		// Memory that can be written is never executed, nor is memory of the process ever changed into code: there is no
		// mprotect.
		{number: unix.SYS_MMAP, when: []match{{2, unix.PROT_EXEC, []uint32{0}}}, then: allow, others: kill},
		{number: unix.SYS_CLONE, when: []match{{0, whole, []uint32{goThread, view}}}, then: allow, others: kill},
		// Its flags are in memory, where a filter cannot see them. Who gets this answer goes back to clone.
		{number: unix.SYS_CLONE3, then: refuse(unix.ENOSYS)},
		{number: unix.SYS_FCNTL, when: []match{{1, whole, []uint32{
			unix.F_GETFL, unix.F_SETFL, unix.F_GETFD, unix.F_SETFD, unix.F_DUPFD_CLOEXEC,
		}}}, then: allow, others: kill},
		// A thread of its own may step back behind the others.
		{number: unix.SYS_SETPRIORITY, when: []match{{0, whole, []uint32{unix.PRIO_PROCESS}}, {1, whole, []uint32{0}}}, then: allow, others: kill},
		// The runtime names its memory.
		{number: unix.SYS_PRCTL, when: []match{{0, whole, []uint32{unix.PR_SET_VMA}}}, then: allow, others: kill},
	}
	for _, n := range always {
		out = append(out, rule{number: n, then: allow})
	}
	for _, n := range lookups {
		out = append(out, rule{number: n, then: refuse(unix.EPERM)})
	}
	return out
}
