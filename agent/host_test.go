package main

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string // in the error; empty: accepted
	}{
		"defaults":       {nil, ""},
		"slow":           {[]string{"--slow-factor", "10"}, ""},
		"too slow":       {[]string{"--slow-factor", "0.1"}, "--slow-factor"},
		"no data":        {[]string{"--data", ""}, "--data"},
		"two faults":     {[]string{"--data", "", "--run", ""}, "--run"},
		"argument":       {[]string{"extra"}, "extra"},
		"unknown":        {[]string{"--frobnicate"}, "frobnicate"},
		"reserve absurd": {[]string{"--reserve-mib", "99999999999"}, "--reserve-mib"},
	} {
		cfg, err := parseConfig(tc.args, io.Discard)
		switch {
		case tc.want == "" && (err != nil || cfg.budgets.Hold == 0):
			t.Errorf("%s: %v", name, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestStartUpFaultsAreOneSentenceThatSaysWhatToDo(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "used.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	lock, err := lockData(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	_, socketErr := listen(filepath.Join(dir, "used.sock"))
	_, lockErr := lockData(dir)
	for what, err := range map[string]error{
		"load kvm":         checkKVM(filepath.Join(dir, "kvm")),
		"free some space":  checkRoom(dir, 1<<40),
		"stop the program": socketErr,
		"stop it":          lockErr,
	} {
		if err == nil || !strings.Contains(err.Error(), what) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: got %v", what, err)
		}
	}
}

func TestAStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	fresh, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestTheNodeKeepsItsName(t *testing.T) {
	cfg := config{Data: t.TempDir()}
	first, err := nodeID(cfg)
	if err != nil {
		t.Fatal(err)
	}
	second, err := nodeID(cfg)
	if err != nil || first != second || !strings.HasPrefix(first, "node-") {
		t.Errorf("%q then %q, %v", first, second, err)
	}
	cfg.NodeID = "mine"
	if chosen, _ := nodeID(cfg); chosen != "mine" {
		t.Errorf("chosen %q", chosen)
	}
}
