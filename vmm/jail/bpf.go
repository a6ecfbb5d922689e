package jail

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data (linux/seccomp.h), the only thing a filter can look at.
const (
	dataNumber = 0
	dataArch   = 4
	dataArgs   = 16 // six of 8 bytes, low half first
)

// action is what becomes of a system call: a seccomp return value.
type action uint32

const (
	allow action = unix.SECCOMP_RET_ALLOW
	kill  action = unix.SECCOMP_RET_KILL_PROCESS
)

// refuse makes the call fail with an error that the caller can live with.
func refuse(errno unix.Errno) action { return action(unix.SECCOMP_RET_ERRNO | uint32(errno)) }

// rule decides about one system call.
type rule struct {
	number uint32
	then   action // if all of when hold
	when   []match
	others action // otherwise
}

// match holds if argument arg, as far as mask goes, is one of values. Only the low half of an argument is looked at: each one
// that is matched here is a 32-bit number to the kernel, or has all its meaning there.
type match struct {
	arg    uint32
	mask   uint32
	values []uint32
}

// whole is the mask of an argument that matters in all its bits.
const whole = ^uint32(0)

// assemble turns rules into a classic BPF program (linux/filter.h) that kills the process for every call without a rule. Rules
// are tried in their order.
func assemble(rules []rule) ([]unix.SockFilter, error) {
	program := []unix.SockFilter{
		load(dataArch),
		// Numbers mean something else in another ABI. x32 calls have this architecture, and numbers that no rule has.
		jumpEqual(unix.AUDIT_ARCH_X86_64, 1, 0),
		ret(kill),
		load(dataNumber),
	}
	for _, r := range rules {
		body, err := r.body()
		if err != nil {
			return nil, err
		}
		program = append(program, jumpEqual(r.number, 1, 0), jump(uint32(len(body))))
		program = append(program, body...)
	}
	program = append(program, ret(kill))
	if len(program) > unix.BPF_MAXINSNS {
		return nil, fmt.Errorf("jail: the filter has %d instructions, the kernel takes %d", len(program), unix.BPF_MAXINSNS)
	}
	return program, nil
}

// body is what is done for the rule's own system call; it never runs over its end.
func (r rule) body() ([]unix.SockFilter, error) {
	var out []unix.SockFilter
	for _, m := range r.when {
		out = append(out, load(dataArgs+8*m.arg), and(m.mask))
		for i, v := range m.values {
			pass := len(m.values) - i // over the values that are left and the return
			if pass > 255 {
				return nil, fmt.Errorf("jail: %d values for one argument of system call %d", len(m.values), r.number)
			}
			out = append(out, jumpEqual(v, uint8(pass), 0))
		}
		out = append(out, ret(r.others))
	}
	return append(out, ret(r.then)), nil
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

func and(mask uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: mask}
}

// jumpEqual skips yes instructions if the accumulator is k, and no of them otherwise.
func jumpEqual(k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no, K: k}
}

func jump(over uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: over}
}

func ret(a action) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: uint32(a)}
}
