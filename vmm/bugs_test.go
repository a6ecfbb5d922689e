package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// bug is a mistake that others made in public. tests are what would catch it here, as directory.Function; why says how it
// cannot occur, where that is so or where the tests need the explanation.
type bug struct {
	number int
	what   string
	tests  []string
	why    string
}

// bugs are numbered as in the survey they come from. FC is firecracker-microvm/firecracker, CH cloud-hypervisor, infra
// e2b-dev/infra.
var bugs = []bug{
	{1, "FC#5969: guest to host vsock hangs after a restore", []string{"vmm/virtio.TestVsockSnapshotUnderTraffic", "vmm/virtio.TestVsockResumeInPlaceAfterSave"}, ""},
	{2, "FC#2218: vsock broken by a snapshot under traffic", []string{"vmm/virtio.TestVsockSnapshotUnderTraffic"}, ""},
	{3, "FC#4736: no TRANSPORT_RESET on resume", []string{"vmm/virtio.TestVsockRestoreHoldsConnectionsUntilTheGuestForgot", "vmm/virtio.TestVsockRestoreWithoutAnEventBuffer"}, ""},
	{4, "FC#4811: a second snapshot cycle fails", []string{"vmm/machine.TestSaveAndRestoreInAChain", "vmm/machine.TestRealGuestSleepsAndWakes"}, ""},
	{5, "FC#5882: vsock RX before the reset was acknowledged", []string{"vmm/virtio.TestVsockRestoreHoldsConnectionsUntilTheGuestForgot"}, ""},
	{6, "FC#6100: a bare pause blocks vsock RX for ever", []string{"vmm/virtio.TestVsockBarePause", "vmm/machine.TestRealGuestSleepsAndWakes"}, ""},
	{7, "FC#5688: host port used again after a restore", []string{"vmm/virtio.TestVsockPortsAreNewAfterEveryRestore"}, ""},
	{8, "FC#6031: busy loop on a half-closed host socket", []string{"vmm/virtio.TestVsockHalfClosedIsAtRest"}, ""},
	{9, "FC#5485: header and payload in one descriptor corrupt the stream", []string{"vmm/virtio.TestVsockBulk"}, ""},
	{10, "FC#4099: TSC deadline restored before the TSC", []string{"vmm/x86.TestDeadlineIsRestoredLastAndNeverLost", "vmm/machine.TestRealGuestTimeStandsStillInAPause"}, ""},
	{11, "FC#4618: TSC deadline saved as 0", []string{"vmm/x86.TestDeadlineIsRestoredLastAndNeverLost"}, ""},
	{12, "FC#6200: TSC offsets differ between vCPUs", []string{"vmm/machine.TestRestoredTSCsAgree"}, ""},
	{13, "FC#5322: soft lockups after a resume, KVMCLOCK_CTRL missing", []string{"vmm/machine.TestRealGuestSleepsAndWakes"}, "the guest's kernel log must be clean after every wake"},
	{14, "FC#5809: monotonic time jumps by the length of the pause", []string{"vmm/machine.TestRealGuestTimeStandsStillInAPause"}, ""},
	{15, "FC#5738: async page fault MSRs lost", []string{"vmm/x86.TestCPUIDMasksWhatASnapshotCannotCarry"}, "the feature is hidden from guests"},
	{16, "FC#5447: XSAVE area above 4 KiB cut off", []string{"vmm/machine.TestRestoredStateIsTheSavedState", "vmm/snapshot.TestMissingFeaturesAreNamed"}, "its size is asked of KVM (CAP_XSAVE2) and part of the state; no host of ours has AMX to show it"},
	{17, "FC#5764: serial transmission stuck after a restore", []string{"vmm/legacy.TestSerialSurvivesASnapshot"}, ""},
	{18, "FC#5696: diff wrong with two memory slots", []string{"vmm/machine.TestHighMemoryIsSaved", "vmm/machine.TestLargeMemoryIsSavedAndRestored"}, ""},
	{19, "FC#1997: incremental snapshot inconsistent", []string{"vmm/machine.TestDiffIsExact", "vmm/machine.TestDiscardedMemoryIsSavedAsTheGuestSeesIt"}, ""},
	{20, "FC#1929: memory file above 2 GiB panics", []string{"vmm/machine.TestLargeMemoryIsSavedAndRestored"}, ""},
	{21, "FC#4301: snapshot written over the file it is mapped from", []string{"vmm/machine.TestSaveNeverOverwrites"}, ""},
	{22, "FC#4826: tap offloads not restored", []string{"vmm/machine.TestRealGuestNetwork", "vmm/virtio.TestNetOffloadsFollowFeatures"}, ""},
	{23, "FC#5566: balloon and snapshot panic the guest", []string{"vmm/machine.TestRealGuestGivesMemoryBack"}, ""},
	{24, "FC#4990: balloon REMOVE against UFFD COPY", nil, "no userfaultfd: the kernel pages a private mapping in, and MADV_DONTNEED on it needs no handler"},
	{25, "FC#5122: UFFD socket closed in a race", nil, "no userfaultfd and no handler process"},
	{26, "FC#2129: KVM_CREATE_VM takes 27 ms under cgroup v1", []string{"agent/cell.TestCheckSaysWhy"}, "a host without cgroup v2 is refused"},
	{27, "FC#5762: an rng request makes the host allocate its length", []string{"vmm/virtio.TestRNGIsBounded", "vmm/machine.TestHostileQueues"}, ""},
	{28, "FC#5794: balloon statistics stall after a restore", []string{"vmm/virtio.TestBalloonStatistics", "vmm/machine.TestRealGuestGivesMemoryBack"}, ""},
	{29, "FC#5260: a block device starves the other devices", nil, "each queue is served by goroutines of its own, off the vCPUs' threads, and no two devices share a lock"},
	{30, "FC 1.2, 1.5: available index beyond the queue, queues in the MMIO gap", []string{"vmm/machine.TestHostileQueues", "vmm/machine.TestHostileQueueAddresses", "vmm/virtio/virtq.TestNewValidates"}, ""},
	{31, "FC#2792: requests in flight at a snapshot", []string{"vmm/virtio.TestBlockPauseSaveLoad"}, "a pause waits for them; there is no io_uring"},
	{32, "FC#2325: initrd over other memory", []string{"vmm/loader.TestInitrdPlacement", "vmm/x86.TestLowMemoryLayoutIsDisjoint"}, ""},
	{33, "FC#5179: spurious ENOMEM of KVM_RUN", []string{"vmm/machine.TestRunRetriesWhatIsSpurious"}, ""},
	{34, "FC#5046, gokvm#20: EINTR of KVM_CREATE_VM and KVM_RUN", []string{"vmm/machine.TestSignalStorm"}, ""},
	{35, "FC#6120: MSRs unreadable before CPUID is set", []string{"vmm/machine.TestRestoredStateIsTheSavedState"}, "on a kernel from 6.13 on, the order is part of what passes"},
	{36, "FC#5760: VMGENID with a wrong HID", []string{"guest/control.TestHandshake"}, "no VMGENID: the guest is told of a new incarnation, and reseeded, by the handshake"},
	{37, "FC#2670: ARP and time stale after a tap was made anew", []string{"tools/e2e.TestWakeIsTheSamePlaceAtAnotherTime", "vmm/machine.TestRealGuestNetwork"}, "a restored guest keeps its MAC; its connections go on over another tap"},
	{38, "FC#6086: logging in a signal handler deadlocks", []string{"vmm/machine.TestSignalStorm"}, "no code of ours runs in a handler; signals reach Go code through a channel"},
	{39, "CH#7932: clock set after vCPUs ran", []string{"vmm/machine.TestRealGuestTimeStandsStillInAPause", "vmm/machine.TestRestoredStateIsTheSavedState"}, ""},
	{40, "CH#2653: kvmclock lost over a restore", []string{"vmm/machine.TestRealGuestTimeStandsStillInAPause"}, ""},
	{41, "CH#8004: queues not kicked after a restore", []string{"vmm/virtio/mmio.TestPauseAndResume", "vmm/virtio.TestRNGSaveLoad"}, ""},
	{42, "CH#6621: a client without a line, or that hangs up, kills the VM", []string{"vmm/virtio.TestVsockFirstLine", "vmm/virtio.TestVsockHostPeerVanishes", "vmm/virtio.TestVsockLosesPatience", "vmm/virtio.FuzzVsockFirstLine"}, ""},
	{43, "CH#7596: vsock header read twice", []string{"vmm/virtio.TestVsockHeaderIsReadOnce"}, ""},
	{44, "CH#8663: triple fault in a restore on demand", []string{"vmm/machine.TestSaveAndRestoreInAChain", "vmm/machine.TestRestoredGuestRunsOnPopulatedMemory"}, "every restore is on demand, by the host kernel's own paging"},
	{45, "CH#1543: an unreadable MSR aborts the snapshot", []string{"vmm/machine.TestUnknownMSRsAreSkipped"}, ""},
	{46, "CH#7477: seccomp kills on a new libc or kernel path", []string{"tools/e2e.TestVMMsAreJailed", "vmm/jail.TestFilterLetsLive"}, "the end-to-end suite runs under the filter, and a violation ends the process; the binary is static Go without a libc"},
	{47, "E2B#1104: a pause or second resume loses files", []string{"vmm/machine.TestRealGuestGivesMemoryBack", "tools/e2e.TestWakeIsTheSamePlaceAtAnotherTime", "vmm/cow.TestFlushedSurvivesTheProcess"}, ""},
	{48, "infra#2092: swapped pages taken for empty", []string{"vmm/machine.TestPagemapEntries"}, ""},
	{49, "infra#638: clock drift and RCU stalls after a resume", []string{"vmm/machine.TestRealGuestTimeStandsStillInAPause", "vmm/machine.TestRealGuestSleepsAndWakes"}, ""},
	{50, "infra#3385: SIGBUS kills the process", []string{"vmm/guestmem.TestLostPageIsAnError", "vmm/machine.TestTruncatedBaseIsAnError", "vmm/machine.TestTruncatedBaseEndsItsMachineAlone"}, ""},
	{51, "infra#2923: freezing a cgroup in the guest hangs envd", []string{"agent/sandbox.TestPauseWaitsForRequestsInFlightWithinTheGraceAndEndsThemAfterwards"}, "nothing in the guest is frozen: its vCPUs stop"},
	{52, "infra#2830: descriptors recycled, buffers moved by the collector", []string{"vmm/machine.TestBootsAndKillsLeaveNothing"}, "guest memory is mapped outside the heap, each descriptor has one owner that closes it last, and there is no userfaultfd"},
	{53, "infra#3271: a random MAC and a frozen ARP table", []string{"vmm/virtio.TestNetLoadRefusesBadState", "vmm/machine.TestRealGuestNetwork"}, "the MAC is part of the device's state"},
	{54, "e2b/firecracker#8: dirty bitmap wrong without UFFD", []string{"vmm/machine.TestDiffIsExact"}, "there is one way to find written pages, and no bitmap"},
	{55, "CubeSandbox#1084: virtio livelock on restore", []string{"vmm/virtio/mmio.TestPauseAndResume", "vmm/virtio.TestRNGSaveLoad"}, ""},
	{56, "CubeSandbox#1137: a double resume says the VM exists", []string{"agent/sandbox.TestFiftyConcurrentWakesRestoreOnce"}, ""},
	{57, "CubeSandbox#1207: tap busy after the agent restarted", []string{"agent/sandbox.TestRunningSandboxIsTakenOverAndProvesItselfAgain"}, "a VMM is taken over, not made anew; the agent makes no taps yet"},
	{58, "forkd#288: a stale clock breaks TLS", []string{"tools/e2e.TestWakeIsTheSamePlaceAtAnotherTime", "guest/control.TestHandshake"}, ""},
	{59, "mitos#838: SIGPIPE and end of file after a fork", []string{"vmm/virtio.TestVsockHostPeerVanishes"}, "SIGPIPE is ignored"},
	{60, "fcvm#719: restore epoch counted in seconds", []string{"agent/guest.TestHandshakeThenProbeProveAnIncarnation"}, "incarnations are numbered and no number is used again"},
	{61, "AgentENV#102: a connection of an older generation is used", []string{"agent/guest.TestHandshakeThenProbeProveAnIncarnation", "vmm/virtio.TestVsockRestoreHoldsConnectionsUntilTheGuestForgot"}, ""},
	{62, "kata runtime#951: time and vsock of a template are wrong", []string{"tools/e2e.TestWakeIsTheSamePlaceAtAnotherTime", "tools/e2e.TestHelloExample"}, "every sandbox of every test comes from a template"},
	{63, "kata#9774: memory, cgroups, descriptors leak", []string{"vmm/machine.TestBootsAndKillsLeaveNothing", "agent/vmproc.TestStartsAndKillsLeaveNothing"}, ""},
	{64, "kata#4412: hybrid vsock times out while the guest boots", []string{"vmm/virtio.TestVsockRefusesBeforeTheDriverIsUp"}, "the guest says when it is up; nobody polls"},
	{65, "gVisor#5591: vCPU stuck at shutdown, threads grow", []string{"vmm/machine.TestBootsAndKillsLeaveNothing", "vmm/machine.TestPauseStopsAndResumeGoesOn"}, ""},
	{66, "vm0#30221: the balloon stalls the guest", []string{"vmm/machine.TestRealGuestGivesMemoryBack"}, ""},
	{67, "opencomputer#60: a pause in the middle of a vsock close", []string{"vmm/virtio.TestVsockPauseDuringClose"}, ""},
	{68, "virt-pvm#28: no TSC offset on PVM", []string{"vmm/machine.TestRestoredTSCsAgree"}, "a restore warns and goes on where KVM has none"},
}

// Every bug is answered, and every test that is named exists.
func TestBugsOfOthersAreAnswered(t *testing.T) {
	var missing []string
	known := map[string][]string{}
	for i, b := range bugs {
		if b.number != i+1 || b.what == "" || len(b.tests) == 0 && b.why == "" {
			t.Errorf("bug %d (%s) is out of order or has no answer", b.number, b.what)
		}
		for _, name := range b.tests {
			dir, function, _ := strings.Cut(name, ".")
			if _, ok := known[dir]; !ok {
				known[dir] = testFunctions(t, filepath.Join("..", dir))
			}
			if !slices.Contains(known[dir], function) {
				missing = append(missing, name)
			}
		}
	}
	if len(bugs) != 68 || len(missing) > 0 {
		t.Errorf("%d bugs; tests that do not exist: %v", len(bugs), missing)
	}
}

// testFunctions lists the tests and fuzz targets of a directory.
func testFunctions(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if ok && f.Recv == nil && (strings.HasPrefix(f.Name.Name, "Test") || strings.HasPrefix(f.Name.Name, "Fuzz")) {
				names = append(names, f.Name.Name)
			}
		}
	}
	return names
}
