package jail

import (
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// testIOCTLs stands for what package kvm asks for, in number too.
var testIOCTLs = func() []uint32 {
	numbers := []uint32{0xAE80}
	for i := range uint32(100) {
		numbers = append(numbers, 0x4008AE00+i)
	}
	return numbers
}()

// filter is the program in an interpreter. That one reads big-endian words, so it is given them so.
type filter struct{ vm *bpf.VM }

func newFilter(t *testing.T, rules []rule) filter {
	t.Helper()
	program, err := assemble(rules)
	if err != nil {
		t.Fatal(err)
	}
	var raw []bpf.RawInstruction
	for _, i := range program {
		raw = append(raw, bpf.RawInstruction{Op: i.Code, Jt: i.Jt, Jf: i.Jf, K: i.K})
	}
	decoded, whole := bpf.Disassemble(raw)
	if !whole {
		t.Fatal("the program has instructions that are none")
	}
	vm, err := bpf.NewVM(decoded)
	if err != nil {
		t.Fatal(err)
	}
	return filter{vm}
}

func (f filter) decide(t *testing.T, arch, number uint32, args ...uint64) action {
	t.Helper()
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[dataNumber:], number)
	binary.BigEndian.PutUint32(data[dataArch:], arch)
	for i, a := range args {
		binary.BigEndian.PutUint32(data[dataArgs+8*i:], uint32(a))
		binary.BigEndian.PutUint32(data[dataArgs+8*i+4:], uint32(a>>32))
	}
	result, err := f.vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return action(uint32(result))
}

func TestFilterDecides(t *testing.T) {
	f := newFilter(t, rules(testIOCTLs))
	const ours = unix.AUDIT_ARCH_X86_64
	eperm, enosys := refuse(unix.EPERM), refuse(unix.ENOSYS)
	for _, c := range []struct {
		name   string
		arch   uint32
		number uint32
		args   []uint64
		want   action
	}{
		{"read", ours, unix.SYS_READ, nil, allow},
		{"getrandom", ours, unix.SYS_GETRANDOM, nil, allow},
		{"read of the 32-bit ABI", unix.AUDIT_ARCH_I386, 3, nil, kill},
		{"a 32-bit call with a good number", unix.AUDIT_ARCH_I386, unix.SYS_READ, nil, kill},
		{"read of x32", ours, unix.SYS_READ | 0x40000000, nil, kill},
		{"KVM_RUN", ours, unix.SYS_IOCTL, []uint64{5, 0xAE80}, allow},
		{"KVM_RUN with rubbish in the high half, which the kernel cuts off", ours, unix.SYS_IOCTL, []uint64{5, 1<<32 | 0xAE80}, allow},
		{"the last of the ioctls", ours, unix.SYS_IOCTL, []uint64{5, uint64(testIOCTLs[len(testIOCTLs)-1])}, allow},
		{"TIOCSTI", ours, unix.SYS_IOCTL, []uint64{0, unix.TIOCSTI}, kill},
		{"ioctl 0", ours, unix.SYS_IOCTL, []uint64{0, 0}, kill},
		{"an ioctl number in another argument", ours, unix.SYS_IOCTL, []uint64{0xAE80, 1, 0xAE80}, kill},
		{"memory", ours, unix.SYS_MMAP, []uint64{0, 4096, unix.PROT_READ | unix.PROT_WRITE}, allow},
		{"executable memory", ours, unix.SYS_MMAP, []uint64{0, 4096, unix.PROT_READ | unix.PROT_EXEC}, kill},
		{"making memory executable", ours, unix.SYS_MPROTECT, []uint64{0, 4096, unix.PROT_READ | unix.PROT_EXEC}, kill},
		{"a thread", ours, unix.SYS_CLONE, []uint64{goThread}, allow},
		{"a view of memory", ours, unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD)}, allow},
		{"a process that shares files", ours, unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD) | unix.CLONE_FILES}, kill},
		{"a process in namespaces of its own", ours, unix.SYS_CLONE, []uint64{uint64(unix.SIGCHLD) | unix.CLONE_NEWUSER}, kill},
		{"vfork", ours, unix.SYS_VFORK, nil, kill},
		{"a thread in a namespace of its own", ours, unix.SYS_CLONE, []uint64{goThread | unix.CLONE_NEWUSER}, kill},
		{"clone3", ours, unix.SYS_CLONE3, nil, enosys},
		{"F_GETFL", ours, unix.SYS_FCNTL, []uint64{1, unix.F_GETFL}, allow},
		{"F_SETOWN, which can make the kernel send signals", ours, unix.SYS_FCNTL, []uint64{1, unix.F_SETOWN}, kill},
		{"naming memory", ours, unix.SYS_PRCTL, []uint64{unix.PR_SET_VMA}, allow},
		{"PR_SET_DUMPABLE", ours, unix.SYS_PRCTL, []uint64{unix.PR_SET_DUMPABLE, 1}, kill},
		{"a thread steps back", ours, unix.SYS_SETPRIORITY, []uint64{unix.PRIO_PROCESS, 0, 19}, allow},
		{"another's priority", ours, unix.SYS_SETPRIORITY, []uint64{unix.PRIO_PROCESS, 1, 19}, kill},
		{"a user's priority", ours, unix.SYS_SETPRIORITY, []uint64{unix.PRIO_USER, 0, 19}, kill},
		{"open", ours, unix.SYS_OPENAT, nil, eperm},
		{"exec", ours, unix.SYS_EXECVE, nil, kill},
		{"a socket", ours, unix.SYS_SOCKET, nil, kill},
		{"a number that is none", ours, 5000, nil, kill},
	} {
		if got := f.decide(t, c.arch, c.number, c.args...); got != c.want {
			t.Errorf("%s: %#x, want %#x", c.name, uint32(got), uint32(c.want))
		}
	}
}

// Whatever is not in the tables of filter.go ends the process, and no rule hides another one.
func TestFilterKnowsNothingElse(t *testing.T) {
	all := rules(testIOCTLs)
	f := newFilter(t, all)
	seen := map[uint32]bool{}
	for _, r := range all {
		if seen[r.number] {
			t.Errorf("two rules for system call %d", r.number)
		}
		seen[r.number] = true
	}
	for number := range uint32(1024) {
		got := f.decide(t, unix.AUDIT_ARCH_X86_64, number)
		if !seen[number] && got != kill {
			t.Errorf("system call %d: %#x without a rule", number, uint32(got))
		}
		if slices.Contains(always, number) && got != allow {
			t.Errorf("system call %d: %#x, want it let through", number, uint32(got))
		}
	}
}

func TestAssembleRefusesWhatItCannotExpress(t *testing.T) {
	if _, err := assemble([]rule{{number: 1, when: []match{{1, whole, make([]uint32, 300)}}, then: allow, others: kill}}); err == nil {
		t.Error("a jump over 300 instructions fits no byte")
	}
	if _, err := assemble(make([]rule, 3000)); err == nil {
		t.Error("the kernel takes no program of 9,000 instructions")
	}
}

func TestSpecTravelsAsArguments(t *testing.T) {
	want := Spec{UID: 70000, Files: 5, Limits: Limits{OpenFiles: 1, Threads: 2, FileBytes: 3}, Args: []string{"--log", "-x", "--", "y"}}
	got, asked, err := Asked(want.Argv())
	if err != nil || !asked || got.UID != want.UID || got.Files != want.Files || got.Limits != want.Limits || !slices.Equal(got.Args, want.Args) {
		t.Errorf("got %+v, %v, %v", got, asked, err)
	}
	for _, args := range [][]string{nil, {"--socket", "jailed"}, {"x"}} {
		if _, asked, err := Asked(args); asked || err != nil {
			t.Errorf("%q: asked %v, %v", args, asked, err)
		}
	}
	for name, bad := range map[string]Spec{
		"root":      {UID: 0, Files: 3, Limits: DefaultLimits},
		"no change": {UID: 1<<32 - 1, Files: 3, Limits: DefaultLimits},
		"no stderr": {UID: 1, Files: 2, Limits: DefaultLimits},
		"no limits": {UID: 1, Files: 3},
	} {
		if _, asked, err := Asked(bad.Argv()); !asked || err == nil {
			t.Errorf("%s: %v, %v", name, asked, err)
		}
		if err := Enter(bad); err == nil {
			t.Errorf("%s: entered", name)
		}
	}
	if _, asked, err := Asked([]string{word, "-uid", "x"}); !asked || err == nil {
		t.Errorf("a user that is no number: %v, %v", asked, err)
	}
	if err := Enter(Spec{UID: 1, Files: 3, Limits: DefaultLimits}); err == nil {
		t.Error("entered without a pid namespace")
	}
}
