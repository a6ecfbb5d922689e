package e2e

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"torpor/tools/hostvm"
	"torpor/tools/rest"
)

var instanceName, listenAddr = hostvm.ForTests()

// system is Torpor as the tests see it: an API, and a root shell on the host that runs the microVMs.
type system struct {
	*rest.Client
	root     string           // of the repository
	torpor   string           // the CLI
	env      []string         // for the CLI and for scripts
	instance *hostvm.Instance // nil on a hardware host
	baseline string           // what the host looked like before any sandbox, see leftovers
}

// start brings the system up. What an earlier run left behind, up or half dead, is taken down first.
func start(ctx context.Context, state string) (*system, error) {
	root, err := filepath.Abs("../..")
	if err != nil {
		return nil, err
	}
	s := &system{root: root, torpor: filepath.Join(root, ".bin", "torpor"), env: append(os.Environ(), "XDG_STATE_HOME="+state)}
	for _, name := range []string{"E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY", "E2B_DOMAIN", "E2B_DEBUG"} {
		s.env = append(s.env, name+"=")
	}
	if _, err := os.Stat(s.torpor); err != nil {
		return nil, fmt.Errorf("the programs are not built (%w): run `make build`", err)
	}
	if hardware, why := hostvm.Hardware(); !hardware {
		fmt.Fprintln(os.Stderr, "emulated host:", why)
		slowness = emulatedSlowness
		cache, err := hostvm.CacheDir()
		if err != nil {
			return nil, err
		}
		if s.instance, err = hostvm.Open(cache, instanceName); err != nil {
			return nil, err
		}
		if err := s.instance.Down(ctx, false); err != nil {
			return nil, fmt.Errorf("taking down what an earlier run left: %w", err)
		}
	}
	if err := s.bringUp(ctx); err != nil {
		return s, err
	}
	if err := s.killAll(ctx); err != nil {
		return s, err
	}
	s.baseline, err = s.leftovers(ctx)
	return s, err
}

// bringUp runs `torpor up` and takes the address and the key from what it prints.
func (s *system) bringUp(ctx context.Context) error {
	out, err := s.cli(ctx, "up", "--instance", instanceName, "--listen", listenAddr)
	if err != nil {
		return fmt.Errorf("torpor up: %w", err)
	}
	vars := map[string]string{}
	for line := range strings.Lines(out) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			vars[name] = value
		}
	}
	keepAlive := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	s.Client = &rest.Client{API: vars["E2B_API_URL"], Sandbox: vars["E2B_SANDBOX_URL"], Key: vars["E2B_API_KEY"], HTTP: keepAlive}
	if s.API == "" || s.Sandbox == "" || s.Key == "" {
		return fmt.Errorf("torpor up did not print the three E2B variables:\n%s", out)
	}
	return nil
}

// takeDown ends everything and says what was left.
func (s *system) takeDown(ctx context.Context) error {
	if s.Client == nil {
		return nil
	}
	errs := []error{s.killAll(ctx)}
	if after, err := s.leftovers(ctx); err != nil {
		errs = append(errs, err)
	} else if after != s.baseline {
		errs = append(errs, fmt.Errorf("the host is not as it was before the first sandbox. Before:\n%s\nAfter:\n%s", s.baseline, after))
	}
	_, err := s.cli(ctx, "down", "--instance", instanceName, "--listen", listenAddr)
	errs = append(errs, err)
	if s.instance != nil {
		errs = append(errs, noQEMU(s.instance))
	} else if out, err := s.shell(ctx, "pgrep -x 'torpor-(agent|controlplane|vmm)' || true"); err != nil || out != "" {
		errs = append(errs, fmt.Errorf("processes left after down: %s %w", out, err))
	}
	return errors.Join(errs...)
}

func (s *system) killAll(ctx context.Context) error {
	list, err := s.List(ctx, "")
	if err != nil {
		return err
	}
	for _, sb := range list {
		if err := s.Kill(ctx, sb.SandboxID); err != nil && rest.StatusOf(err) != http.StatusNotFound {
			return fmt.Errorf("killing %s: %w", sb.SandboxID, err)
		}
	}
	return nil
}

// leftovers lists what a sandbox may leave on the host: processes, sockets and directories, mounts, cgroups, network links.
func (s *system) leftovers(ctx context.Context) (string, error) {
	return s.shell(ctx, `
echo processes; for p in /proc/[0-9]*; do
  exe=$(readlink $p/exe 2>/dev/null) || continue
  case $exe in *torpor-vmm*) tr '\0' ' ' < $p/cmdline; echo;; esac
done | grep -v /ahead-
echo sockets; find /run/torpor/vm -mindepth 1 2>/dev/null | grep -v /ahead- | sort
echo files; find /var/lib/torpor/agent/sandboxes /var/lib/torpor/agent/snapshots -mindepth 1 2>/dev/null | sort
echo mounts; cut -d' ' -f2,3 /proc/mounts | sort
echo cgroups; for c in $(find /sys/fs/cgroup/torpor -mindepth 1 -type d 2>/dev/null | sort); do
  tr '\0' ' ' < /proc/$(head -n 1 $c/cgroup.procs 2>/dev/null)/cmdline 2>/dev/null | grep -q /ahead- || echo $c
done
echo links; ls /sys/class/net | sort`)
}

// noQEMU reports what an instance that is down may not have.
func noQEMU(i *hostvm.Instance) error {
	dir := filepath.Dir(i.Console())
	var left []string
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch e.Name() {
		case "lock", "data.img", "console.log", "console.log.1", "qemu.log":
		default:
			left = append(left, e.Name())
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("left in %s after down: %v", dir, left)
	}
	return nil
}

// cli runs the torpor program and returns its standard output; its standard error is shown and, when it fails, told.
func (s *system) cli(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.torpor, args...)
	cmd.Env = s.env
	if s.Client != nil {
		cmd.Env = append(cmd.Env, s.sdkEnv()...)
	}
	var stderr bytes.Buffer
	cmd.Stderr = io.MultiWriter(os.Stderr, &stderr)
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("torpor %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(out), err
}

func (s *system) sdkEnv() []string {
	return []string{"E2B_API_URL=" + s.API, "E2B_SANDBOX_URL=" + s.Sandbox, "E2B_API_KEY=" + s.Key}
}

// shell runs a shell command as root on the host that runs the microVMs.
func (s *system) shell(ctx context.Context, line string) (string, error) {
	code, stdout, stderr, err := s.shellStatus(ctx, line)
	if err == nil && code != 0 {
		err = fmt.Errorf("%q exited with %d: %s", line, code, cmp.Or(stderr, stdout))
	}
	return stdout, err
}

// shellStatus is shell for commands that may fail; err then only says that the command could not be run.
func (s *system) shellStatus(ctx context.Context, line string) (code int, stdout, stderr string, err error) {
	var out, complaint bytes.Buffer
	if s.instance != nil {
		code, err = s.instance.Exec(ctx, line, nil, &out, &complaint)
	} else {
		cmd := exec.CommandContext(ctx, "sh", "-c", line)
		cmd.Stdout, cmd.Stderr = &out, &complaint
		err = cmd.Run()
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			code, err = exit.ExitCode(), nil
		}
	}
	return code, out.String(), complaint.String(), err
}

// push copies a local file to the host.
func (s *system) push(ctx context.Context, local, remote string) error {
	if s.instance != nil {
		return s.instance.Push(ctx, local, remote)
	}
	_, err := s.shell(ctx, fmt.Sprintf("mkdir -p '%s' && cp '%s' '%s'", filepath.Dir(remote), local, remote))
	return err
}

// hostBin is where the host has the programs.
func (s *system) hostBin() string {
	if s.instance != nil {
		return "/usr/lib/torpor/bin"
	}
	return filepath.Join(s.root, ".bin")
}
