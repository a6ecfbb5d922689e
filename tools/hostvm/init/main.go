// Init is the first process of an emulated host, and its exec server.
//
// As process 1 it mounts what a Linux host has mounted, loads the modules listed in /etc/hostvm/modules, brings up the
// network, starts itself again as the exec server, and from then on reaps orphans and prints a heartbeat. SIGUSR2,
// SIGTERM or SIGPWR (busybox poweroff) shut the machine down: everything is asked to end, the disks are unmounted, the
// power goes off. The exec server is a process of its own so that process 1 may reap any child at all.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Where things are inside the emulated host; tools/hostvm writes the same names into the initial file system.
const (
	configPath  = "/etc/hostvm/config.json"
	modulesPath = "/etc/hostvm/modules"
)

// heartbeat is how often process 1 says on the console that it lives. hostvm calls the machine frozen after several
// missed ones.
const heartbeat = 5 * time.Second

func main() {
	if os.Getpid() != 1 {
		if err := serve(context.Background(), configPath); err != nil {
			report("exec server: %v", err)
			os.Exit(1)
		}
		return
	}
	if err := boot(); err != nil {
		report("FATAL: %v", err)
		powerOff()
	}
	powerOff()
}

// report prints one line on the console, which is this process's standard output.
func report(format string, args ...any) {
	fmt.Printf("torpor-hostvm: "+format+"\n", args...)
}

// boot makes the machine usable and stays until it is told to shut down.
func boot() error {
	if err := ownRoot(); err != nil {
		return err
	}
	if err := mountAll(); err != nil {
		return err
	}
	report("first process at %s s", uptime())
	cfg, err := readConfig(configPath)
	if err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return unix.Sethostname([]byte(cfg.Hostname)) },
		raiseLimits,
		loadModules,
		func() error { return mountDisks(cfg) },
		bringUpNetwork,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return supervise()
}

// supervise keeps the exec server running and the console's heartbeat beating, and reaps every orphan, until a signal
// asks for the end.
func supervise() error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGTERM, unix.SIGINT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPWR)
	child := make(chan os.Signal, 1)
	signal.Notify(child, unix.SIGCHLD)
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()

	server, err := startServer()
	if err != nil {
		return err
	}
	report("ready at %s s", uptime())
	for {
		select {
		case <-stop:
			report("shutting down")
			return nil
		case <-child:
			if reap(server) {
				report("the exec server ended")
				server = 0
			}
		case <-beat.C:
			report("alive at %s s", uptime())
			if server == 0 { // here, so that one that cannot live is not tried without rest
				if server, err = startServer(); err != nil {
					return err
				}
			}
		}
	}
}

func startServer() (pid int, err error) {
	cmd := exec.Command("/proc/self/exe", "serve")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = []string{
		"PATH=/usr/lib/torpor/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "USER=root", "LOGNAME=root", "SHELL=/bin/sh", "TERM=dumb", "LANG=C.UTF-8",
	}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start the exec server: %w", err)
	}
	return cmd.Process.Pid, nil
}

// reap collects every child that has ended and tells whether server was among them.
func reap(server int) (serverEnded bool) {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if pid <= 0 || err != nil {
			return serverEnded
		}
		serverEnded = serverEnded || pid == server
	}
}

// uptime is the kernel's own clock since boot, in seconds, as text.
func uptime() string {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return "?"
	}
	up, _, _ := strings.Cut(string(b), " ")
	return up
}
