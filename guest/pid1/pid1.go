// Package pid1 is the first process of a guest: it boots it, starts the daemon and starts it again if it dies, reaps
// orphans, and powers off. It does nothing else, so that nothing a user does can make it fail: if it ends, so does the
// guest.
package pid1

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"
)

// Times of the supervisor and of the shutdown.
const (
	backoffMin = 50 * time.Millisecond // before the daemon is started again, doubling while it keeps dying young
	backoffMax = 2 * time.Second
	oldAge     = 10 * time.Second // a daemon that lived this long did not die young
	termGrace  = 3 * time.Second  // for processes to end after SIGTERM
	killGrace  = 2 * time.Second  // and after SIGKILL
)

// PID1 is the first process. All fields are required.
type PID1 struct {
	// Path is the PATH of the daemon.
	Path string
	// Args and Hello are the daemon's arguments; Hello is added when it is started for the first time in this boot.
	Args  []string
	Hello string
	Log   zerolog.Logger

	environ []string // more of the daemon's environment, for tests
}

// Run is the life of PID 1; args are the process's own. It returns only if the guest cannot be booted.
func (p *PID1) Run(args []string) error {
	unix.Umask(0o022)
	if len(args) < 2 || args[1] != SecondStage {
		return p.boot()
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &openFiles); err != nil {
		p.Log.Warn().Err(err).Msg("raising the limit of open files")
	}
	p.setup()
	stop, children := catch()
	r := newReaper()
	go r.run(children, nil) // for as long as the guest lives
	p.supervise(r, stop)
	p.powerOff(r)
	return nil
}

// catch takes over every signal: any one without a handler would end a Go program, and PID 1 must not end. Those that ask
// for a shutdown and SIGCHLD have a channel. Nothing is ignored, since that would be inherited.
func catch() (stop, children <-chan os.Signal) {
	shutdown, child := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(shutdown, unix.SIGTERM, unix.SIGINT, unix.SIGPWR)
	signal.Notify(child, unix.SIGCHLD)
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM, unix.SIGABRT,
		unix.SIGTRAP, unix.SIGPIPE, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU, unix.SIGVTALRM, unix.SIGXCPU, unix.SIGXFSZ,
		unix.SIGIO, unix.SIGSYS, unix.SIGSTKFLT, unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL)
	return shutdown, child
}

// supervise keeps the daemon running until a signal asks to stop.
func (p *PID1) supervise(r *reaper, stop <-chan os.Signal) {
	args := append([]string{"envd"}, p.Args...)
	argv := append(args[:len(args):len(args)], p.Hello)
	pause := backoffMin
	for {
		born := time.Now()
		ended, err := p.startDaemon(r, argv)
		if err == nil {
			select {
			case status := <-ended:
				p.Log.Error().Str("status", describe(status)).Msg("the daemon ended; starting it again")
			case <-stop:
				return
			}
		} else {
			p.Log.Error().Err(err).Msg("the daemon cannot be started; trying again")
		}
		argv = args
		if time.Since(born) > oldAge {
			pause = backoffMin
		}
		select {
		case <-time.After(pause):
		case <-stop:
			return
		}
		pause = min(2*pause, backoffMax)
	}
}

func (p *PID1) startDaemon(r *reaper, argv []string) (<-chan unix.WaitStatus, error) {
	_, ended, err := r.start("/proc/self/exe", argv, &syscall.ProcAttr{
		Dir: "/", Env: append([]string{"PATH=" + p.Path, "HOME=/root"}, p.environ...), Files: []uintptr{0, 1, 2},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	return ended, err
}

func describe(s unix.WaitStatus) string {
	if s.Signaled() {
		return "signal: " + s.Signal().String()
	}
	return fmt.Sprintf("exit status %d", s.ExitStatus())
}
