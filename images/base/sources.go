package base

import (
	"context"
	"fmt"
	"strings"

	"torpor/images/command"
)

// targetFormat makes apt say, one line an index, where the machine gets its packages from.
const targetFormat = "$(CREATED_BY)|$(ORIGIN)|$(CODENAME)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)"

// sources gives the machine's own apt sources for the guest's Debian release, as lines of a sources.list.
func sources(ctx context.Context) ([]string, error) {
	for _, update := range []bool{false, true} {
		if update { // a machine that never ran it does not know what its sources hold
			if _, err := command.Run(ctx, command.Command{Name: "apt-get", Args: []string{"-q", "update"}}); err != nil {
				return nil, err
			}
		}
		out, err := command.Run(ctx, command.Command{Name: "apt-get", Args: []string{"indextargets", "--format", targetFormat}})
		if err != nil {
			return nil, err
		}
		if lines := parseTargets(string(out.Stdout)); len(lines) > 0 {
			return lines, nil
		}
	}
	return nil, fmt.Errorf("this machine's apt has no source for Debian %s: add one to /etc/apt/sources.list.d and run again", suite)
}

// parseTargets picks the lines of Debian itself: the release, its updates and its security fixes, no backports.
func parseTargets(text string) []string {
	var lines []string
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimSpace(line), "|")
		if len(f) != 6 || f[0] != "Packages" || f[1] != "Debian" || f[4] != "main" {
			continue
		}
		switch strings.TrimPrefix(f[2], suite) {
		case "", "-updates", "-security":
		default:
			continue
		}
		if source := fmt.Sprintf("deb %s %s main", f[5], f[3]); !seen[source] {
			seen[source] = true
			lines = append(lines, source)
		}
	}
	return lines
}

// acquireOptions are the machine's proxies and other download settings, for mmdebstrap's apt to work as the machine's does.
func acquireOptions(ctx context.Context) ([]string, error) {
	out, err := command.Run(ctx, command.Command{Name: "apt-config", Args: []string{"dump", "Acquire"}})
	if err != nil {
		return nil, err
	}
	return parseAcquire(string(out.Stdout)), nil
}

func parseAcquire(dump string) []string {
	var options []string
	for line := range strings.Lines(dump) {
		line = strings.TrimSuffix(strings.TrimSpace(line), ";")
		name, value, ok := strings.Cut(line, " ")
		if !ok || value == `""` {
			continue
		}
		name = strings.ToLower(name)
		for _, kind := range []string{"acquire::http", "acquire::https", "acquire::check-valid-until", "acquire::check-date", "acquire::retries"} {
			if name == kind || strings.HasPrefix(name, kind+"::") {
				options = append(options, line)
				break
			}
		}
	}
	return options
}
