# Install moet-desk in WSL from Windows. Written by its documentation; not tried on Windows yet.
#
#   powershell -File installer\install.ps1 install WHEEL [-Distribution NAME] [options of install.sh]
#   powershell -File installer\install.ps1 list | rollback | uninstall [--models | --all]
#
# moet-desk needs Linux; Windows 10 and 11 run it in WSL 2, where NVIDIA's Windows driver serves the card
# too. This script checks WSL and hands over to install.sh there: see its first lines for the options.
[CmdletBinding()]
param(
    [Parameter(Mandatory = $true, Position = 0)]
    [ValidateSet('install', 'list', 'rollback', 'uninstall', 'bundle')]
    [string] $Command,

    [string] $Distribution = '',

    [Parameter(ValueFromRemainingArguments = $true)]
    [string[]] $Rest = @()
)

Set-StrictMode -Version Latest
$ErrorActionPreference = 'Stop'

function Stop-WithAdvice {
    param([string] $What, [string] $Do)
    [Console]::Error.WriteLine($What)
    [Console]::Error.WriteLine("Do: $Do")
    exit 4
}

if (-not (Get-Command wsl.exe -ErrorAction SilentlyContinue)) {
    Stop-WithAdvice 'WSL is not installed.' 'run as administrator: wsl --install, then restart.'
}

$Wsl = @()
if ($Distribution) { $Wsl = @('--distribution', $Distribution) }

& wsl.exe @Wsl --exec uname -s | Out-Null
if ($LASTEXITCODE -ne 0) {
    Stop-WithAdvice 'No Linux of WSL answers.' 'run: wsl --install -d Debian, then open it once.'
}

# WSL 1 has no graphics card and another kernel.
$Kernel = & wsl.exe @Wsl --exec uname -r
if ($Kernel -notmatch 'WSL2|microsoft-standard') {
    Stop-WithAdvice 'This Linux runs in WSL 1.' 'run: wsl --set-version NAME 2'
}

function Convert-ToLinuxPath {
    param([string] $Path)
    $Full = (Resolve-Path -LiteralPath $Path).Path
    $Linux = & wsl.exe @Wsl --exec wslpath -a -u $Full
    if ($LASTEXITCODE -ne 0) {
        Stop-WithAdvice "$Full is not seen from WSL." 'copy it to a local drive.'
    }
    return $Linux
}

# Arguments that are paths of Windows become paths of Linux; options stay as they are.
$Arguments = @($Command)
foreach ($Word in $Rest) {
    if (-not $Word.StartsWith('--') -and (Test-Path -LiteralPath $Word)) {
        $Arguments += Convert-ToLinuxPath $Word
    }
    else {
        $Arguments += $Word
    }
}

$Script = Convert-ToLinuxPath (Join-Path $PSScriptRoot 'install.sh')
& wsl.exe @Wsl --exec sh $Script @Arguments
exit $LASTEXITCODE
