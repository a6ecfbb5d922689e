package vmproc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"torpor/agent/cell"
	"torpor/api/vmmpb"
	"torpor/vmm/jail"
)

// launch starts the process. Nobody but the process has its sockets when it returns.
func (s *Supervisor) launch(ctx context.Context, name string, log *os.File) (*Process, error) {
	inherited, err := s.openDescriptors(s.Dir(name))
	if err != nil {
		return nil, err
	}
	defer inherited.close()
	cmd, itsCell, err := s.start([]string{machineFlag, s.Dir(name)}, log, inherited)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Binary, err)
	}
	p, err := take(cmd.Process.Pid, cmd, itsCell)
	if err != nil {
		err = errors.Join(err, cmd.Process.Kill(), cmd.Wait())
		if itsCell != nil {
			err = errors.Join(err, itsCell.Remove(ctx))
		}
		return nil, err
	}
	return p, nil
}

// start starts the program in a jail of its own.
func (s *Supervisor) start(args []string, log *os.File, files []*os.File) (cmd *exec.Cmd, itsCell *cell.Cell, err error) {
	if s.Cells == nil {
		cmd = command(s.Binary, args, log, files)
		return cmd, nil, cmd.Start()
	}
	itsCell, err = s.Cells.Start(func(uid int, cgroup *os.File) error {
		spec := jail.Spec{UID: uid, Files: 3 + len(files), Limits: jail.DefaultLimits, Args: args}
		cmd = command(s.Binary, spec.Argv(), log, files)
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID // the other namespaces it makes itself
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(cgroup.Fd())
		return cmd.Start()
	})
	return cmd, itsCell, err
}

// command is the program in a session of its own: no terminal or group signal of the agent reaches it, nor does the environment.
func command(binary string, args []string, log *os.File, files []*os.File) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = []string{}
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// limit gives the cell the limits of the machine that is about to be made.
func (p *Process) limit(m *vmmpb.Machine) error {
	if p.cell == nil {
		return nil
	}
	return p.cell.Limit(m.GetMemoryBytes(), int(m.GetVcpus()))
}
